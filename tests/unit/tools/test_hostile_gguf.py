"""Truncated and inconsistent GGUF files: one message each, before transformers opens them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from slime.utils.errors import ConfigError
from tests.unit.tools.test_convert_gguf import VOCAB, write_gguf
from tools.convert_gguf_to_hf import check_is_supported, convert
from tools.gguf_header import read_gguf_header

pytestmark = pytest.mark.timeout(30)  # an endless read fails

BIG = 1 << 60
HEADER = 10_000
"""Roughly the number of bytes in the good file's header."""
TEXT, ARRAY, UINT32, UINT64 = 8, 9, 4, 10


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
    "2^60 keys": (head(keys=BIG), f"claims {BIG} keys and 0 tensors in"),
    "a key of 2^60 bytes": (head(text(b"a", BIG) + bytes(40)), f"a key has {BIG} bytes"),
    "a list of a type that there is not": (head(key("a", ARRAY, listed(99, 1, bytes(40)))), "values of the type 99"),
    "a type that there is not": (head(tensors=(tensor(kind=4),)) + bytes(32), "a has the type 4"),
    "an offset after the file": (head(tensors=(tensor(begin=BIG),)) + bytes(32), f"32 bytes at {BIG}"),
    "tensors over each other": (
        head(tensors=(tensor(sides=(16,)), tensor("b", begin=32))) + bytes(64), "the tensors before it end at 64"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_a_header_that_says_what_cannot_be_is_one_message(name, tmp_path):
    data, says = HEADS[name]
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(ConfigError, match=rf"x\.gguf is no GGUF file that can be read: .*{says}") as told:
        convert(tmp_path / "x.gguf", tmp_path / "hf", "float32")
    assert "\n" not in str(told.value) and len(str(told.value)) < 600 and not (tmp_path / "hf").exists()


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
    ]:  # the last 32 are padding
        cut.write_bytes(data[:length])
        with pytest.raises(ConfigError, match=r"x\.gguf is no GGUF file"):
            read_gguf_header(cut)


L = "llama."
FIELDS = {
    "no architecture": ({"general.architecture": None}, "general.architecture is None"),
    "a size of 0": ({f"{L}attention.head_count": 0}, "llama.attention.head_count is '0'"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "has no tokenizer"),
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
