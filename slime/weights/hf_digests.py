"""Digests of safetensors files: of the header, and of each tensor; of each row of a tensor that stacks matrices.

A reader maps the file and takes one tensor, or one expert of a stack; it compares that, and reads nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, uint8

from slime.utils.errors import DataError
from slime.weights.file_digests import FolderDigests, Piece, digest_of
from slime.weights.stored_tensors import LENGTH_BYTES, StoredTensor, read_header


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
    data = _bytes(tensor)
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
