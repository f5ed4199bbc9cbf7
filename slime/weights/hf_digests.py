"""Digests of safetensors files: of the header, and of each tensor; of each row of a tensor that stacks matrices.

A reader maps the file and takes one tensor, or one expert of a stack; it compares that, and reads nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor, uint8

from slime.utils.errors import DataError
from slime.weights.file_digests import DIGEST_FILE, FolderDigests, Piece, digest_of
from slime.weights.stored_tensors import LENGTH_BYTES, MappedFile, StoredTensor, read_header, weight_files


def pieces_of(path: Path, tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Return the digests of a file that has just been written, from the tensors in memory.

    Args:
        path: the file; its header is read.
        tensors: what was written, on the CPU and contiguous.
    """
    header = _header(path)
    pieces = [(0, len(header), digest_of(header))]
    for name, stored in read_header(path)[0].items():
        pieces += [(begin, part.nbytes, digest_of(part)) for begin, part in _parts(stored, tensors[name])]
    return pieces


def pieces_of_file(path: Path) -> list[Piece]:
    """Return the digests of a file that others wrote, from its bytes."""
    header = _header(path)
    pieces = [(0, len(header), digest_of(header))]
    with MappedFile(path) as mapped:
        for stored in read_header(path)[0].values():
            pieces += [(begin, part.nbytes, digest_of(part)) for begin, part in _split(stored, mapped.part(stored))]
    return pieces


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
        for begin, part in _parts(stored, tensor):
            digests.check(name, begin, part, what=stored.name)
    else:
        begin = stored.begin + row * stored.row_bytes
        digests.check(name, begin, _bytes(tensor), what=f"{stored.name}[{row}]")


def _parts(stored: StoredTensor, tensor: Tensor) -> Iterator[tuple[int, Any]]:
    yield from _split(stored, _bytes(tensor))


def _split(stored: StoredTensor, data: Any) -> Iterator[tuple[int, Any]]:
    size = stored.row_bytes if len(stored.shape) >= 3 else stored.num_bytes
    for begin in range(0, stored.num_bytes, size) if size else ():
        yield stored.begin + begin, data[begin : begin + size]


def _bytes(tensor: Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(uint8).numpy()


def _header(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            length = file.read(LENGTH_BYTES)
            return length + file.read(int.from_bytes(length, "little"))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error
