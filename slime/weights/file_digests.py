"""Digests of a folder's files: written with the folder, verified while it is read.

    digests.json
    {"algorithm": "xxh3_64",
     "files": {"common.pt": [[0, 1234, "9d0c..."]], "__0_0.distcp": [[0, 4096, "1b2f..."], [4096, 800, "77e0..."]]},
     "digest": "..."}                                    digest of the value of "files"

A file is a gapless sequence of pieces ``[first byte, number of bytes, digest]``.  A rank that needs only some tensors
of a file verifies just their pieces, from bytes that it reads anyway.  XXH3 guards against damage, not against an
adversary, who could rewrite the digests.

The pieces of a safetensors file are the header and each tensor, or each row of a tensor that stacks matrices.  So a
reader that maps the file and takes one tensor, or one expert of a stack, verifies just that and reads nothing twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeAlias

import xxhash
from torch import Tensor, uint8

from slime.utils.errors import DataError
from slime.utils.files import opened, parse_object, read_outside_file, write_atomically
from slime.weights.stored_tensors import (
    INDEX_FILE,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    SUFFIX,
    MappedFile,
    StoredTensor,
    read_header,
    read_layout,
    weight_files,
)

DIGEST_FILE = "digests.json"
ALGORITHM = "xxh3_64"
OVERLAP_BYTES = 8 << 20
"""Data of at least this size are digested in another thread while they are written or decoded.  Smaller data are in
the CPU cache, where digesting costs less than handing over to a thread."""
REMEDY = "Copy it again, or use another checkpoint; --no-verify-checkpoint reads it unverified, damage included."

Piece: TypeAlias = tuple[int, int, str]
"""First byte, number of bytes, digest."""


def digest_of(data: Any) -> str:
    """Return the digest of bytes or of any object with the buffer protocol."""
    return xxhash.xxh3_64_hexdigest(data)


class DigestWriter:
    """A file being written; digests its bytes piece by piece as they pass.

    Closing waits until the file is on disk.

    ``error`` is the first file-system error.  Code that writes tensors through this object may raise a different one.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self.pieces: list[Piece] = []
        self.error: OSError | None = None
        self._file, self._path = file, path
        self._begin = self._position = 0
        self._hash = xxhash.xxh3_64()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="digest")

    def begin_piece(self) -> None:
        """End the current piece unless it is empty, and begin another."""
        if self._position > self._begin:
            self.pieces.append((self._begin, self._position - self._begin, self._hash.hexdigest()))
            self._begin = self._position
            self._hash.reset()

    def write(self, data: Any) -> int:
        """Write and digest ``data``; return its number of bytes."""
        size = memoryview(data).nbytes
        digest = self._pool.submit(self._hash.update, data) if size >= OVERLAP_BYTES else None
        try:
            self._guarded(lambda: self._file.write(data))
        finally:
            digest.result() if digest is not None else self._hash.update(data)
        self._position += size
        return size

    def flush(self) -> None:
        """Flush buffered bytes to the operating system."""
        self._guarded(self._file.flush)

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._position

    def close(self) -> None:
        """End the last piece and wait until everything is on disk."""
        self._pool.shutdown()
        if self._file.closed:
            return
        self.begin_piece()
        self.flush()
        self._guarded(lambda: os.fsync(self._file.fileno()))
        self._guarded(self._file.close)

    def _guarded(self, act: Any) -> None:
        try:
            act()
        except OSError as error:
            self.error = self.error or OSError(error.errno, error.strerror, str(self._path))
            raise self.error from error


class FolderDigests:
    """The content of a folder's ``digests.json``."""

    def __init__(self, folder: Path, files: Mapping[str, Sequence[Piece]]) -> None:
        self.folder = folder
        self.files = files
        self._piece_at = {(name, piece[0]): piece for name, pieces in files.items() for piece in pieces}

    @classmethod
    def read(cls, folder: Path) -> FolderDigests | None:
        """Return a folder's digests; None if it has no ``digests.json``.

        Raises:
            DataError: ``digests.json`` itself is damaged.
        """
        path = folder / DIGEST_FILE
        if not os.path.lexists(path):
            return None
        try:
            content = parse_object(read_outside_file(path))
            files = {
                str(name): [(int(begin), int(size), str(digest)) for begin, size, digest in pieces]
                for name, pieces in content["files"].items()
            }
            is_whole = content["digest"] == digest_of(_canonical(files)) and content["algorithm"] == ALGORITHM
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{path} is damaged ({type(error).__name__}: {error}). {REMEDY}") from error
        if not is_whole:
            raise DataError(f"{path} is damaged: its own digest does not match its content. {REMEDY}")
        return cls(folder, files)

    def write(self, *, flag: str = "--save") -> None:
        """Write ``digests.json`` and wait until it is on disk.

        Raises:
            DataError: it cannot be written.
        """
        data = self.to_bytes()
        write_atomically(self.folder / DIGEST_FILE, lambda file: file.write(data), what="The digests", flag=flag)

    def to_bytes(self) -> bytes:
        """Return the content of ``digests.json``."""
        files = {name: list(pieces) for name, pieces in sorted(self.files.items())}
        content = {"algorithm": ALGORITHM, "files": files, "digest": digest_of(_canonical(files))}
        return json.dumps(content, separators=(",", ":")).encode()

    def check_size(self, name: str) -> None:
        """Check the length of a file.

        Raises:
            DataError: it is missing, has another length, or was not there when the folder was written.
        """
        path = self.folder / name
        if name not in self.files:
            raise DataError(f"{path} is not among the files written to this folder ({DIGEST_FILE}). {REMEDY}")
        expected = sum(size for _, size, _ in self.files[name])
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise DataError(f"{path} is missing; {DIGEST_FILE} lists it with {expected} bytes.") from None
        if size != expected:
            raise DataError(f"{path} has {size} bytes but was written with {expected}. {REMEDY}")

    def check(self, name: str, begin: int, data: Any, *, what: str = "") -> None:
        """Check a piece of file ``name``, starting at byte ``begin``, against its digest.

        Args:
            data: the bytes that were read.
            what: what the piece holds, for messages.

        Raises:
            DataError: the bytes differ from those written, or no such piece was written.
        """
        piece = self._piece_at.get((name, begin))
        size = memoryview(data).nbytes
        if piece is None or piece[1] != size:
            raise DataError(
                f"{self.folder / name}: no piece of {size} bytes was written at {begin}{_holding(what)}. {REMEDY}"
            )
        if (digest := digest_of(data)) != piece[2]:
            raise DataError(
                f"{self.folder / name} is damaged: the {size} bytes at {begin}{_holding(what)} have the digest "
                f"{digest}, but were written with {piece[2]}. {REMEDY}"
            )


def _holding(what: str) -> str:
    return f", {what}," if what else ""


def _canonical(files: Mapping[str, Sequence[Piece]]) -> bytes:
    return json.dumps(files, sort_keys=True, separators=(",", ":")).encode()


def pieces_of(path: Path, tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Return the pieces of a file that was just written, digested from the tensors in memory."""
    return _pieces(path, lambda stored: _bytes(tensors[stored.name]))


def pieces_of_file(path: Path) -> list[Piece]:
    """Return the pieces of an existing file, digested from its bytes."""
    with MappedFile(path) as mapped:
        return _pieces(path, mapped.part)


def _pieces(path: Path, bytes_of: Callable[[StoredTensor], Any]) -> list[Piece]:
    header = _header(path)
    pieces = [(0, len(header), digest_of(header))]
    for stored in read_header(path)[0].values():
        pieces += [(begin, part.nbytes, digest_of(part)) for begin, part in _split(stored, bytes_of(stored))]
    return pieces


def check_headers(folder: Path, *, verify: bool = True) -> None:
    """Check names, headers and lengths of a folder's safetensors against its index and digests, reading no weights.

    Args:
        folder: a model folder; one without safetensors passes.
        verify: whether to check the headers against the digests too.

    Raises:
        DataError: a file is missing, truncated or damaged, or does not match the index.
    """
    if not (folder / INDEX_FILE).exists() and not any(folder.glob(f"*{SUFFIX}")):
        return
    read_layout(folder)
    if verify and (digests := FolderDigests.read(folder)) is not None:
        for path in weight_files(folder):
            check_header(digests, path)


def check_in_background(folder: Path) -> Future[None] | None:
    """Start verifying all weights of a folder against its digests in a thread; None if it has no digests.

    The future raises a DataError if a file is damaged or was added after the folder was written.
    """
    if not (folder / DIGEST_FILE).is_file():
        return None
    pool = ThreadPoolExecutor(1, thread_name_prefix="digests of the model")
    done = pool.submit(_check_files, folder)
    pool.shutdown(wait=False)
    return done


def _check_files(folder: Path) -> None:
    digests = FolderDigests.read(folder)
    assert digests is not None
    for path in weight_files(folder):
        check_file(digests, path)


def check_file(digests: FolderDigests, path: Path) -> None:
    """Check a whole file against its digests.

    Raises:
        DataError: it is damaged.
    """
    check_header(digests, path)
    with MappedFile(path) as mapped:
        for begin, size, _ in digests.files[path.name]:
            digests.check(path.name, begin, mapped.bytes[begin : begin + size])


def check_header(digests: FolderDigests, path: Path) -> None:
    """Check a file's length and header.

    Raises:
        DataError: the file is damaged.
    """
    digests.check_size(path.name)
    digests.check(path.name, 0, _header(path), what="the header")


def check_tensor(digests: FolderDigests, stored: StoredTensor, tensor: Tensor, *, row: int | None = None) -> None:
    """Check a tensor that was read whole, or (with ``row``) one row of it.

    Raises:
        DataError: the file is damaged.
    """
    name = stored.file.name
    if row is None:
        for begin, part in _split(stored, _bytes(tensor)):
            digests.check(name, begin, part, what=stored.name)
    else:
        begin = stored.begin + row * stored.row_bytes
        digests.check(name, begin, _bytes(tensor), what=f"{stored.name}[{row}]")


def _split(stored: StoredTensor, data: Any) -> Iterator[tuple[int, Any]]:
    size = stored.row_bytes if len(stored.shape) >= 3 else stored.num_bytes
    for begin in range(0, stored.num_bytes, size) if size else ():
        yield stored.begin + begin, data[begin : begin + size]


def _bytes(tensor: Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(uint8).numpy()


def _header(path: Path) -> bytes:
    try:
        with opened(path) as file:
            length = file.read(LENGTH_BYTES)
            return length + file.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error
