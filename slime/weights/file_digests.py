"""Digests of the files of a folder: written with it, compared while it is read.

    digests.json
    {"algorithm": "xxh3_64",
     "files": {"common.pt": [[0, 1234, "9d0c..."]], "__0_0.distcp": [[0, 4096, "1b2f..."], [4096, 800, "77e0..."]]},
     "digest": "..."}                                    of the value of "files"

A file is a row of pieces ``[first byte, bytes, digest]`` without gaps.  So a rank that needs some tensors of a file
compares just those, with the bytes that it reads anyway.  XXH3 guards against damage, not against an adversary, who
would write digests of his own.

Of a safetensors file the pieces are the header and each tensor, or each row of a tensor that stacks matrices: a reader
maps the file and takes one tensor, or one expert of a stack; it compares that, and reads nothing twice.
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
"""Data from this size on are digested by another thread while they are written or decoded; smaller ones are in the
processor's cache, where a digest takes less than handing it out."""
REMEDY = (
    "Copy it again, or use another checkpoint; --no-verify-checkpoint reads it as it is, with whatever the damage did."
)

Piece: TypeAlias = tuple[int, int, str]
"""First byte, number of bytes, digest."""


def digest_of(data: Any) -> str:
    """Return the digest of bytes, or of anything that gives a view of its bytes."""
    return xxhash.xxh3_64_hexdigest(data)


class DigestWriter:
    """A file that is being written, digested piece by piece while the bytes pass.

    Closing it waits until it is on disk.

    Invariant: ``error`` is the first error of the file system; what writes tensors through this may report another.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self.pieces: list[Piece] = []
        self.error: OSError | None = None
        self._file, self._path = file, path
        self._begin = self._position = 0
        self._hash = xxhash.xxh3_64()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="digest")

    def begin_piece(self) -> None:
        """End the piece before, if there is any of it, and begin another."""
        if self._position > self._begin:
            self.pieces.append((self._begin, self._position - self._begin, self._hash.hexdigest()))
            self._begin = self._position
            self._hash.reset()

    def write(self, data: Any) -> int:
        """Write bytes and digest them."""
        size = memoryview(data).nbytes
        digest = self._pool.submit(self._hash.update, data) if size >= OVERLAP_BYTES else None
        try:
            self._guarded(lambda: self._file.write(data))
        finally:
            digest.result() if digest is not None else self._hash.update(data)
        self._position += size
        return size

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._guarded(self._file.flush)

    def tell(self) -> int:
        """Return the number of bytes so far."""
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
        """Return the digests of a folder; None when it was written without.

        Raises:
            DataError: the file of digests is itself damaged.
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
            raise DataError(f"{path} is damaged: its digest is not that of its content. {REMEDY}")
        return cls(folder, files)

    def write(self, *, flag: str = "--save") -> None:
        """Write ``digests.json``, and wait until it is on disk.

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
        """Compare the length of a file.

        Raises:
            DataError: it is missing, has another length, or was not there when the folder was written.
        """
        path = self.folder / name
        if name not in self.files:
            raise DataError(f"{path} is not one of the files that were written here ({DIGEST_FILE}). {REMEDY}")
        expected = sum(size for _, size, _ in self.files[name])
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise DataError(f"{path} is missing; {DIGEST_FILE} beside it has it, with {expected} bytes.") from None
        if size != expected:
            raise DataError(f"{path} has {size} bytes and was written with {expected}. {REMEDY}")

    def check(self, name: str, begin: int, data: Any, *, what: str = "") -> None:
        """Compare the digest of a piece of a file that was read.

        Args:
            data: its bytes.

        Raises:
            DataError: the bytes are not those that were written.
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
                f"{digest} and were written with {piece[2]}. {REMEDY}"
            )


def _holding(what: str) -> str:
    return f", {what}," if what else ""


def _canonical(files: Mapping[str, Sequence[Piece]]) -> bytes:
    return json.dumps(files, sort_keys=True, separators=(",", ":")).encode()


def pieces_of(path: Path, tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Return the digests of a file that has just been written, from the tensors in memory."""
    return _pieces(path, lambda stored: _bytes(tensors[stored.name]))


def pieces_of_file(path: Path) -> list[Piece]:
    """Return the digests of a file that others wrote, from its bytes."""
    with MappedFile(path) as mapped:
        return _pieces(path, mapped.part)


def _pieces(path: Path, bytes_of: Callable[[StoredTensor], Any]) -> list[Piece]:
    header = _header(path)
    pieces = [(0, len(header), digest_of(header))]
    for stored in read_header(path)[0].values():
        pieces += [(begin, part.nbytes, digest_of(part)) for begin, part in _split(stored, bytes_of(stored))]
    return pieces


def check_headers(folder: Path, *, verify: bool = True) -> None:
    """Compare names, headers and lengths of a folder's safetensors with its index and digests; read no weights.

    Args:
        folder: of a model; one whose weights are in other files passes.

    Raises:
        DataError: a file is missing, cut or damaged, or is not what the index says.
    """
    if not (folder / INDEX_FILE).exists() and not any(folder.glob(f"*{SUFFIX}")):
        return
    read_layout(folder)
    if verify and (digests := FolderDigests.read(folder)) is not None:
        for path in weight_files(folder):
            check_header(digests, path)


def check_in_background(folder: Path) -> Future[None] | None:
    """Begin to compare all weights of a folder with the digests beside them; None where there are none.

    The result is a DataError when a file is damaged, or was not there when the folder was written.
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
    """Compare a whole file.

    Raises:
        DataError: it is damaged.
    """
    check_header(digests, path)
    with MappedFile(path) as mapped:
        for begin, size, _ in digests.files[path.name]:
            digests.check(path.name, begin, mapped.bytes[begin : begin + size])


def check_header(digests: FolderDigests, path: Path) -> None:
    """Compare length and header of a file.

    Raises:
        DataError: the file is damaged.
    """
    digests.check_size(path.name)
    digests.check(path.name, 0, _header(path), what="the header")


def check_tensor(digests: FolderDigests, stored: StoredTensor, tensor: Tensor, *, row: int | None = None) -> None:
    """Compare a tensor that was read whole, or one row of it.

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
