"""Deltas: compressed byte differences of tensors, their application in place, and the base they are relative to.

Two lossless encodings of the change from ``old`` to ``new``:

    xor        new ^ old for every byte: mostly zeros, which zstd shrinks to almost nothing
    overwrite  u4 count | count u4 positions | count new bytes   (little endian)

The encoded stream is compressed with zstd.  Applying ``overwrite`` twice is harmless; applying ``xor`` twice undoes
it, so the reader must record whether a delta has been applied (see ``local_copy``).

A trainer rank advances its base in two steps: :meth:`DeltaBase.encode` compares new weights with the base, and
:meth:`DeltaBase.commit` makes them the base once the engines serve them.  In between the rank keeps the compressed
deltas, not a second copy of the weights.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import xxhash
import zstandard

from slime.utils.errors import ConfigError, WeightSyncError
from slime.weights.stored_tensors import Bytes

ENCODINGS = ("xor", "overwrite")
COMPRESSION = "zstd"
ZSTD_LEVEL = 1
CHUNK_BYTES = 4 * 1024**2
"""Bytes processed at a time; small enough to stay in the CPU cache between comparison, compression and checksum."""
MAX_POSITION = (1 << 32) - 1
_U4 = np.dtype("<u4")


class Checksum(Protocol):
    """An incremental checksum; accepts any contiguous buffer."""

    def update(self, data: Any, /) -> Any: ...

    def hexdigest(self) -> str: ...


class Adler32:
    """zlib's 32-bit checksum: available everywhere, but weak; for readers that have no better one."""

    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any, /) -> None:
        """Add ``data`` to the checksum."""
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        """Return eight hex digits."""
        return f"{self._value:08x}"


def _blake3() -> Checksum:
    try:
        from blake3 import blake3
    except ImportError as error:
        raise ConfigError(
            "--update-weight-delta-checksum blake3 needs the package blake3, which is not installed here (trainer and "
            "engine hosts need it); pip install blake3, or use xxh3-128"
        ) from error
    return blake3()


CHECKSUMS: dict[str, Callable[[], Checksum]] = {
    "xxh3-128": xxhash.xxh3_128,
    "blake3": _blake3,
    "adler32": Adler32,
}


def new_checksum(name: str) -> Checksum:
    """Return an empty checksum.

    Raises:
        ConfigError: the name is unknown, or its package is not installed.
    """
    if name not in CHECKSUMS:
        raise ConfigError(f"--update-weight-delta-checksum is {name!r}; there are {', '.join(CHECKSUMS)}")
    return CHECKSUMS[name]()


@dataclass(frozen=True, slots=True)
class EncodedDelta:
    """The change of one tensor."""

    blob: bytes
    """The compressed stream."""
    num_changed: int
    """Number of bytes that differ."""
    checksum: str
    """Checksum of the new bytes, in hex."""


def encode_delta(old: Bytes, new: Bytes, *, encoding: str, checksum: str) -> EncodedDelta | None:
    """Return the change from ``old`` to ``new``; None if they are equal.

    Raises:
        ConfigError: unknown encoding or checksum; ``overwrite`` for a tensor larger than 4 GiB.
        WeightSyncError: the sizes differ.
    """
    if old.size != new.size:
        raise WeightSyncError(f"a delta goes from {old.size} to {new.size} bytes; the tensor's shape or dtype changed")
    if encoding not in ENCODINGS:
        raise ConfigError(f"--update-weight-delta-encoding is {encoding!r}; there are {', '.join(ENCODINGS)}")
    if encoding == "overwrite" and new.size > MAX_POSITION:
        raise ConfigError(
            f"--update-weight-delta-encoding overwrite has 32-bit positions, but a tensor has {new.size} bytes; "
            "use xor"
        )
    return _encode_xor(old, new, checksum) if encoding == "xor" else _encode_overwrite(old, new, checksum)


def _chunks(size: int) -> list[slice]:
    return [slice(start, min(start + CHUNK_BYTES, size)) for start in range(0, size, CHUNK_BYTES)]


def _encode_xor(old: Bytes, new: Bytes, checksum: str) -> EncodedDelta | None:
    check, out = new_checksum(checksum), io.BytesIO()
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True).compressobj(size=new.size)
    difference = np.empty(min(CHUNK_BYTES, new.size), np.uint8)
    changed = num_held_back = 0
    for part in _chunks(new.size):
        chunk = difference[: part.stop - part.start]
        np.bitwise_xor(old[part], new[part], out=chunk)
        changed += int(np.count_nonzero(chunk))
        check.update(new[part])
        if not changed:
            num_held_back += chunk.size  # compress nothing for an unchanged tensor; most may be unchanged
            continue
        while num_held_back:
            zeros = np.zeros(min(num_held_back, CHUNK_BYTES), np.uint8)
            out.write(compressor.compress(zeros.data))
            num_held_back -= zeros.size
        out.write(compressor.compress(chunk.data))
    if not changed:
        return None
    out.write(compressor.flush())
    return EncodedDelta(out.getvalue(), changed, check.hexdigest())


def _encode_overwrite(old: Bytes, new: Bytes, checksum: str) -> EncodedDelta | None:
    check = new_checksum(checksum)
    found = []
    for part in _chunks(new.size):
        found.append((np.flatnonzero(old[part] != new[part]) + part.start).astype(_U4))
        check.update(new[part])
    positions = np.concatenate(found) if found else np.empty(0, _U4)
    if not positions.size:
        return None
    stream = b"".join([np.array([positions.size], _U4).tobytes(), positions.tobytes(), new[positions].tobytes()])
    blob = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True).compress(stream)
    return EncodedDelta(blob, int(positions.size), check.hexdigest())


def apply_delta(target: Bytes, blob: bytes | memoryview, *, encoding: str, checksum: str) -> str:
    """Apply a delta to ``target`` in place and return the checksum of the result, which the caller must compare.

    A bad stream never changes bytes outside ``target``; when an error is raised, ``target`` may be partly changed.

    Raises:
        WeightSyncError: the stream is damaged or was made for a tensor of another size, or its encoding is unknown.
    """
    if encoding not in ENCODINGS:
        raise WeightSyncError(f"the delta has the encoding {encoding!r}; this version of slime knows {ENCODINGS}")
    try:
        with zstandard.ZstdDecompressor().stream_reader(blob) as stream:
            return (_apply_xor if encoding == "xor" else _apply_overwrite)(target, stream, checksum)
    except zstandard.ZstdError as error:
        raise WeightSyncError(f"the compressed stream is damaged: {error}") from error


def _read_into(stream: zstandard.ZstdDecompressionReader, buffer: Bytes) -> None:
    """Fill ``buffer``; a single read may return less."""
    view, done = buffer.data, 0
    while done < len(view):
        count = stream.readinto(view[done:])
        if not count:
            raise WeightSyncError(f"the stream ends {len(view) - done} bytes early; it was made for a larger tensor")
        done += count


def _expect_end(stream: zstandard.ZstdDecompressionReader) -> None:
    if stream.read(1):
        raise WeightSyncError("the stream is longer than the tensor needs; it was made for another tensor")


def _apply_xor(target: Bytes, stream: zstandard.ZstdDecompressionReader, checksum: str) -> str:
    check = new_checksum(checksum)
    buffer = np.empty(min(CHUNK_BYTES, target.size), np.uint8)
    for part in _chunks(target.size):
        chunk = buffer[: part.stop - part.start]
        _read_into(stream, chunk)
        np.bitwise_xor(target[part], chunk, out=target[part])
        check.update(target[part])
    _expect_end(stream)
    return check.hexdigest()


def _apply_overwrite(target: Bytes, stream: zstandard.ZstdDecompressionReader, checksum: str) -> str:
    count = np.empty(1, _U4)
    _read_into(stream, count.view(np.uint8))
    if count[0] > target.size:
        raise WeightSyncError(f"the stream changes {count[0]} bytes of a tensor that has {target.size}")
    positions, values = np.empty(int(count[0]), _U4), np.empty(int(count[0]), np.uint8)
    _read_into(stream, positions.view(np.uint8))
    _read_into(stream, values)
    _expect_end(stream)
    if positions.size and int(positions.max()) >= target.size:
        raise WeightSyncError(f"the stream changes byte {positions.max()} of a tensor that has {target.size}")
    target[positions] = values
    check = new_checksum(checksum)
    for part in _chunks(target.size):
        check.update(target[part])
    return check.hexdigest()


class DeltaBase:
    """The base of one process: for each of its tensors, the bytes that deltas are relative to.

    Args:
        encoding: encoding of the deltas, one of ``ENCODINGS``.
        checksum: checksum of the new bytes, one of ``CHECKSUMS``.
    """

    def __init__(self, *, encoding: str, checksum: str) -> None:
        self._tensors: dict[str, Bytes] = {}
        self._encoding, self._checksum = encoding, checksum
        self._pending: dict[str, EncodedDelta | Bytes] = {}

    def seed(self, name: str, data: Bytes) -> None:
        """Set the bytes that engines hold of a tensor before the first push.  Takes ownership of ``data``."""
        self._tensors[name] = data

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def replace(self, name: str, new: Bytes) -> None:
        """Make ``new`` the base at the next commit, for a tensor that is sent in full."""
        self._pending[name] = new

    def encode(self, name: str, new: Bytes) -> EncodedDelta | None:
        """Return the change of one tensor from the base to ``new``; None if there is none.

        Raises:
            WeightSyncError: the base has no such tensor, or one of another size.
        """
        if name not in self._tensors:
            raise WeightSyncError(f"{name} is new since the first push; the model's parameters must not change")
        encoded = encode_delta(self._tensors[name], new, encoding=self._encoding, checksum=self._checksum)
        if encoded is None:
            self._pending.pop(name, None)
        else:
            self._pending[name] = encoded
        return encoded

    def commit(self, workers: int = 1) -> None:
        """Make the tensors encoded last the base, because the engines serve them.

        Raises:
            WeightSyncError: a tensor has the wrong checksum afterwards; the base is then unusable.
        """
        pending, self._pending = self._pending, {}
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(self._advance, pending, pending.values()):
                pass

    def _advance(self, name: str, change: EncodedDelta | Bytes) -> None:
        if not isinstance(change, EncodedDelta):
            self._tensors[name] = change
            return
        found = apply_delta(self._tensors[name], change.blob, encoding=self._encoding, checksum=self._checksum)
        if found != change.checksum:
            raise WeightSyncError(
                f"the trainer's own base of {name} has the checksum {found} after a commit instead of "
                f"{change.checksum}: host memory was damaged"
            )

    def discard(self) -> None:
        """Discard the tensors encoded last, because the engines did not accept them."""
        self._pending = {}

    def items(self) -> Iterator[tuple[str, Bytes]]:
        """Yield all tensors of the base."""
        yield from self._tensors.items()
