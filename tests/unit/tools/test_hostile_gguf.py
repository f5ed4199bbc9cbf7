"""GGUF files that are cut, or say what cannot be: one message each, before transformers opens them."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.utils.errors import ConfigError
from tests.unit.tools.test_convert_gguf import VOCAB, write_gguf
from tools.convert_gguf_to_hf import check_is_supported, convert
from tools.gguf_header import ListInfo, read_gguf_header

BIG = 1 << 60
HEADER = 10_000
"""Bytes of the good file that are about as many as its header has."""
TEXT, ARRAY, UINT32, UINT64 = 8, 9, 4, 10
ARCHITECTURE = ("general.architecture", TEXT, "llama")


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """A read that has no end fails."""
    before = signal.signal(signal.SIGALRM, lambda *unused: pytest.fail("it hangs"))
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def key(name: str, kind: int, value: Any) -> bytes:
    content = text(value) if kind == TEXT else value if isinstance(value, bytes) else struct.pack("<I", value)
    return text(name) + struct.pack("<I", kind) + content


def tensor(name: str = "a", sides: tuple[int, ...] = (8,), kind: int = 0, begin: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sides)}QIQ", len(sides), *sides, kind, begin)


def head(
    *parts: bytes, version: int = 3, keys: int | None = None, tensors: tuple[bytes, ...] = (), num_tensors: int = -1
) -> bytes:
    counts = struct.pack("<QQ", len(tensors) if num_tensors < 0 else num_tensors, len(parts) if keys is None else keys)
    data = b"GGUF" + struct.pack("<I", version) + counts + b"".join(parts) + b"".join(tensors)
    return data + bytes(-len(data) % 32)


def listed(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + content


HEADS = {
    "nothing": (b"", "the magic has 4 bytes"),
    "another magic": (b"GGML" + bytes(100), "does not begin with b'GGUF'"),
    "only the magic": (b"GGUF", "the version has 4 bytes, and 0 are left"),
    "another version": (head(version=1), "the version 1; 2 and 3"),
    "the other order of bytes": (b"GGUF" + struct.pack(">I", 3) + bytes(100), "the version 50331648"),
    "2^60 keys": (head(keys=BIG), f"claims {BIG} keys and 0 tensors in"),
    "2^60 tensors": (head(num_tensors=BIG), f"claims 0 keys and {BIG} tensors in"),
    "a key of 2^60 bytes": (head(text(b"a", BIG) + bytes(40)), f"a key has {BIG} bytes"),
    "a key of no text": (head(key("x", UINT32, 1).replace(b"x", b"\xff")), "a key is no UTF-8"),
    "a text of 2^60 bytes": (head(text("a") + struct.pack("<I", TEXT) + text(b"x", BIG)), f"a has {BIG} bytes"),
    "a list of 2^60 numbers": (head(key("a", ARRAY, listed(UINT32, BIG))), f"a claims {BIG} values"),
    "a list of 2^60 texts": (head(key("a", ARRAY, listed(TEXT, BIG))), f"a claims {BIG} values"),
    "a list of a type that there is not": (head(key("a", ARRAY, listed(99, 1, bytes(40)))), "values of the type 99"),
    "a list of lists": (head(key("a", ARRAY, listed(ARRAY, 1, listed(ARRAY, 1, bytes(40))))), "of the type 9"),
    "a value of a type that there is not": (head(key("a", 77, bytes(8))), "a has the type 77"),
    "a key twice": (head(key("a", UINT32, 1), key("a", UINT32, 2)), "the key 'a' twice"),
    "a tensor twice": (head(tensors=(tensor(), tensor(begin=32))) + bytes(64), "the tensor 'a' twice"),
    "alignment 0": (head(key("general.alignment", UINT32, 0)), "general.alignment is 0"),
    "alignment 3": (head(key("general.alignment", UINT32, 3)), "general.alignment is 3"),
    "an alignment that is a text": (head(key("general.alignment", TEXT, "x")), "general.alignment is 'x'"),
    "dimension 0": (head(tensors=(tensor(sides=(0, 8)),)) + bytes(32), r"the sides \[0, 8\]"),
    "no dimension": (head(tensors=(tensor(sides=()),)) + bytes(32), "a has 0 dimensions"),
    "2^31 dimensions": (head(tensors=(text("a") + struct.pack("<I", 1 << 31) + bytes(40),)), "2147483648 dimensions"),
    "sides whose product overflows": (head(tensors=(tensor(sides=(1 << 32, 1 << 32)),)), "would be the .* bytes at 0"),
    "a type that there is not": (head(tensors=(tensor(kind=4),)) + bytes(32), "a has the type 4"),
    "a type of 2^31": (head(tensors=(tensor(kind=1 << 31),)) + bytes(32), "a has the type 2147483648"),
    "half a block": (head(tensors=(tensor(sides=(40,), kind=8),)) + bytes(64), "in blocks of 32"),
    "an offset after the file": (head(tensors=(tensor(begin=BIG),)) + bytes(32), f"32 bytes at {BIG}"),
    "an offset between places": (head(tensors=(tensor(begin=4),)) + bytes(64), "multiples of 32"),
    "tensors over each other": (
        head(tensors=(tensor(sides=(16,)), tensor("b", begin=32))) + bytes(64), "the tensors before it end at 64"
    ),
    "no data": (head(tensors=(tensor(),)), "the file at 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_a_header_that_says_what_cannot_be_is_one_message(name, tmp_path):
    data, says = HEADS[name]
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(ConfigError, match=rf"x\.gguf is no GGUF file that can be read: .*{says}") as told:
        convert(tmp_path / "x.gguf", tmp_path / "hf", "float32")
    assert "\n" not in str(told.value) and len(str(told.value)) < 600 and not (tmp_path / "hf").exists()


def test_a_list_of_more_values_than_a_reader_can_hold_is_refused(tmp_path):
    data = head(key("a", ARRAY, listed(0, 1 << 24, bytes(1 << 24))))
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(ConfigError, match="a claims 16777216 values"):
        read_gguf_header(tmp_path / "x.gguf")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_named(make, tmp_path):
    make(tmp_path / "x.gguf")
    with pytest.raises(ConfigError, match=r"--gguf .*x\.gguf is no file"):
        convert(tmp_path / "x.gguf", tmp_path / "hf", "float32")


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path)
    return path


def test_a_file_that_is_cut_anywhere_is_named(good, tmp_path):
    data, cut = good.read_bytes(), tmp_path / "x.gguf"
    for length in [
        *range(0, HEADER, 7),
        *range(HEADER, len(data) - 32, 997),
        len(data) - 33,
    ]:  # the last 32 fill a place up
        cut.write_bytes(data[:length])
        with pytest.raises(ConfigError, match=r"x\.gguf is no GGUF file"):
            read_gguf_header(cut)


def test_every_byte_of_a_header_may_be_another(good, tmp_path):
    """Each flip is one error of ours, or leaves a header that fits the file."""
    data, flipped = bytearray(good.read_bytes()), tmp_path / "x.gguf"
    num_errors = 0
    for place in range(0, HEADER, 13):
        data[place] ^= 0xFF
        flipped.write_bytes(data)
        data[place] ^= 0xFF
        try:
            check_is_supported(read_gguf_header(flipped))
        except ConfigError as error:
            num_errors += 1
            assert "\n" not in str(error)
    assert num_errors > 300


L = "llama."
FIELDS = {
    "no architecture": ({"general.architecture": None}, "general.architecture is None"),
    "an architecture that is a number": ({"general.architecture": 5}, "general.architecture is 5"),
    "no sizes": ({f"{L}embedding_length": None}, "llama.embedding_length is 'None'"),
    "a size of 0": ({f"{L}attention.head_count": 0}, "llama.attention.head_count is '0'"),
    "a size that is a text": ({f"{L}feed_forward_length": "x"}, "llama.feed_forward_length is 'x'"),
    "a billion layers": ({f"{L}block_count": 10**9}, "llama.block_count 1000000000 makes"),
    "another width": ({f"{L}embedding_length": 10**9}, "the file has blk.0.attn_k.weight"),
    "other heads": ({f"{L}attention.head_count_kv": 4}, "the file has blk.0.attn_k.weight"),
    "a context below 0": ({f"{L}context_length": -1}, "llama.context_length is '-1'"),
    "a base that is no number": ({f"{L}rope.freq_base": float("nan")}, "llama.rope.freq_base is nan"),
    "a large vocabulary": ({f"{L}vocab_size": 10**9}, "the file has token_embd.weight"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "has no tokenizer"),
    "tokens that are numbers": ({"tokenizer.ggml.tokens": ListInfo(False, 5)}, "has no tokenizer"),
    "other types": ({"tokenizer.ggml.token_type": ListInfo(False, 5)}, "must be a list of"),
    "a special token that there is not": ({"tokenizer.ggml.eos_token_id": len(VOCAB)}, "there are 270 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_sizes_that_are_not_those_of_the_tensors_are_named_by_their_key(name, good):
    changes, says = FIELDS[name]
    header = read_gguf_header(good)
    check_is_supported(header)
    for field, value in changes.items():
        header.fields.pop(field)
        header.fields.update({} if value is None else {field: value})
    with pytest.raises(ConfigError, match=says):
        check_is_supported(header)


def test_what_transformers_does_not_expect_is_one_message(good, tmp_path):
    data = good.read_bytes().replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.mergeX")
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(ConfigError, match=r"transformers cannot read --gguf .*x\.gguf \(") as told:
        convert(tmp_path / "x.gguf", tmp_path / "hf", "float32")
    assert "\n" not in str(told.value) and not (tmp_path / "hf").exists()
