"""Both encodings against a plain reference, on bytes of every kind; and damaged streams."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
import zstandard

from slime.ext.fast_push.disk import delta
from slime.ext.fast_push.disk.delta import apply_delta, encode_delta
from slime.utils.errors import ConfigError, WeightSyncError

KINDS = ("xor", "overwrite")


def pairs():
    """(name, old, new): sizes around a chunk's end, no change, every byte, a few, the last one."""
    random = np.random.default_rng(7)
    for size in (1, 3, 99, 100, 101, 200, 1000):
        old = random.integers(0, 256, size, dtype=np.uint8)
        yield f"all of {size}", old, old ^ np.uint8(255)
        last = old.copy()
        last[-1] ^= 1
        yield f"the last of {size}", old, last
        some = old.copy()
        picked = random.random(size) < 0.1
        picked[0] = True
        some[picked] += 1
        yield f"some of {size}", old, some


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(delta, "CHUNK_BYTES", 100)


def plain(old, new, encoding):
    """The stream by its definition."""
    if encoding == "xor":
        return bytes(a ^ b for a, b in zip(old.tolist(), new.tolist(), strict=True))
    where = [i for i in range(len(old)) if old[i] != new[i]]
    numbers = b"".join(number.to_bytes(4, "little") for number in [len(where), *where])
    return numbers + bytes(int(new[i]) for i in where)


@pytest.mark.parametrize("encoding", KINDS)
@pytest.mark.parametrize(("old", "new"), [pytest.param(old, new, id=name) for name, old, new in pairs()])
def test_the_stream_is_the_defined_one_and_leads_from_old_to_new(old, new, encoding):
    encoded = encode_delta(old, new, encoding=encoding, checksum="xxh3-128")
    assert encoded is not None
    stream = zstandard.ZstdDecompressor().decompressobj().decompress(encoded.blob)
    assert stream == plain(old, new, encoding)
    assert encoded.num_changed == int((old != new).sum())
    assert encoded.checksum == xxhash.xxh3_128_hexdigest(new.tobytes())
    target = old.copy()
    assert apply_delta(target, encoded.blob, encoding=encoding, checksum="xxh3-128") == encoded.checksum
    assert (target == new).all()


@pytest.mark.parametrize("encoding", KINDS)
def test_every_flipped_bit_of_a_stream_is_found(encoding):
    old = np.arange(150, dtype=np.uint8)
    new = old.copy()
    new[[3, 70, 149]] += 5
    encoded = encode_delta(old, new, encoding=encoding, checksum="xxh3-128")
    for position in range(8 * len(encoded.blob)):
        damaged = bytearray(encoded.blob)
        damaged[position // 8] ^= 1 << position % 8
        target = old.copy()
        try:
            found = apply_delta(target, bytes(damaged), encoding=encoding, checksum="xxh3-128")
        except WeightSyncError:
            continue
        # One bit of the frame's header is unused and may flip; the bytes are still right then.
        assert found != encoded.checksum or (target == new).all()


@pytest.mark.parametrize("encoding", KINDS)
def test_a_delta_of_another_tensor_is_refused(encoding):
    old = np.zeros(200, np.uint8)
    encoded = encode_delta(old, np.ones_like(old), encoding=encoding, checksum="adler32")
    with pytest.raises(WeightSyncError, match="another tensor|of a tensor that has 100"):
        apply_delta(np.zeros(100, np.uint8), encoded.blob, encoding=encoding, checksum="adler32")
    if encoding == "xor":
        with pytest.raises(WeightSyncError, match="made for a larger|100 bytes early"):
            apply_delta(np.zeros(300, np.uint8), encoded.blob, encoding=encoding, checksum="adler32")


def test_wrong_names_and_sizes_are_refused():
    byte = np.zeros(1, np.uint8)
    with pytest.raises(ConfigError, match="--update-weight-delta-encoding is 'rle'"):
        encode_delta(byte, byte, encoding="rle", checksum="adler32")
    with pytest.raises(WeightSyncError, match="from 1 to 2 bytes"):
        encode_delta(byte, np.zeros(2, np.uint8), encoding="xor", checksum="adler32")
    with pytest.raises(WeightSyncError, match="encoding 'rle'"):
        apply_delta(byte, b"", encoding="rle", checksum="adler32")


def test_overwrite_says_which_encoding_takes_tensors_beyond_4_gib(monkeypatch):
    monkeypatch.setattr(delta, "MAX_POSITION", 10)
    with pytest.raises(ConfigError, match="use xor"):
        encode_delta(np.zeros(11, np.uint8), np.ones(11, np.uint8), encoding="overwrite", checksum="adler32")
