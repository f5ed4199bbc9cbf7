"""A ``.safetensors`` file as bytes: where each tensor lies, and files whose tensors are written out of order.

Tensors are read and written in runs of rows (slices of the first dimension), so that memory does not grow with the
file, nor with the tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.utils.errors import DataError
from slime.weights.stored_tensors import STORED_DTYPES

TORCH_DTYPES = {code: getattr(torch, name) for name, code in STORED_DTYPES.items()}
CODES = {dtype: code for code, dtype in TORCH_DTYPES.items()}
LENGTH_BYTES = 8
ALIGNMENT = 8
COPY_BYTES = 32 * 1024**2


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The header entry of one tensor."""

    name: str
    dtype: str
    """As safetensors writes it: ``BF16``, ``F8_E4M3``."""
    shape: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, shape: Iterable[int]) -> TensorInfo:
        """Describe a tensor that is going to be written."""
        sizes = tuple(shape)
        return cls(name, CODES[dtype], sizes, torch.Size(sizes).numel() * dtype.itemsize)

    @property
    def rows(self) -> int:
        """Slices along the first dimension; one for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one slice along the first dimension."""
        return self.num_bytes // self.rows if self.rows else 0


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor and where its bytes begin."""

    info: TensorInfo
    path: Path
    offset: int


def read_header(path: Path) -> dict[str, SourceTensor]:
    """Read the entry of every tensor of a file, in the order of their bytes.

    Raises:
        DataError: the file is no safetensors file, or is shorter or longer than its header says.
    """
    file_bytes = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if file_bytes < LENGTH_BYTES or length > file_bytes - LENGTH_BYTES:
            raise DataError(f"{path} is cut off inside its header ({file_bytes} bytes); copy the shard again")
        text = file.read(length)
    start = LENGTH_BYTES + length
    try:
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        found = [
            SourceTensor(TensorInfo(name, entry["dtype"], tuple(entry["shape"]), end - begin), path, start + begin)
            for name, entry in entries.items()
            for begin, end in [entry["data_offsets"]]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} has no readable safetensors header ({error!r}); copy the shard again") from error
    found.sort(key=lambda stored: stored.offset)
    position = start
    for stored in found:
        info = stored.info
        dtype = TORCH_DTYPES.get(info.dtype)
        needed = info.num_bytes if dtype is None else torch.Size(info.shape).numel() * dtype.itemsize
        if stored.offset != position or info.num_bytes != needed or info.num_bytes < 0:
            raise DataError(f"{path} gives {info.name} a wrong offset or size; copy the shard again")
        position += info.num_bytes
    if position != file_bytes:
        raise DataError(f"{path} has {file_bytes} bytes, its header says {position}; copy the shard again")
    return {stored.info.name: stored for stored in found}


def make_header(tensors: Iterable[TensorInfo]) -> tuple[bytes, dict[str, int]]:
    """Make the header of a file of these tensors, and the offset of each.

    Wide elements come first, as safetensors' own writer orders them, so that every tensor is aligned.
    """
    ordered = sorted(tensors, key=lambda info: -_itemsize(info.dtype))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    begins = {}
    for info in ordered:
        begins[info.name] = position
        end = position + info.num_bytes
        entries[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}


def _itemsize(code: str) -> int:
    dtype = TORCH_DTYPES.get(code)
    return 1 if dtype is None else dtype.itemsize


def read_rows(
    descriptor: int, stored: SourceTensor, first: int = 0, count: int | None = None, *, pin: bool = False
) -> Tensor:
    """Return ``count`` rows of a tensor from ``first`` on (all that follow by default), on the CPU.

    Args:
        descriptor: the open file.
        stored: the tensor.
        first: the first row.
        count: number of rows.
        pin: into pinned memory, which a GPU copies from while this thread goes on.

    Raises:
        DataError: the file ends before the tensor does.
    """
    info = stored.info
    count = info.rows - first if count is None else count
    size = count * info.row_bytes
    flat = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    view = flat.numpy().data
    done = 0
    while done < size:
        got = os.preadv(descriptor, [view[done:]], stored.offset + first * info.row_bytes + done)
        if got == 0:
            raise DataError(f"{stored.path} ended inside {info.name} while it was read; the source is being changed")
        done += got
    shape = (count, *info.shape[1:]) if info.shape else ()
    return flat.view(TORCH_DTYPES[info.dtype]).view(shape)


def write_at(descriptor: int, tensor: Tensor, offset: int) -> None:
    """Write a tensor's bytes at a place of a file."""
    view = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def copy_bytes(source: int, source_offset: int, target: int, target_offset: int, size: int) -> None:
    """Copy bytes between files, inside the kernel where it can.

    Raises:
        DataError: the source ended early.
    """
    done = 0
    in_kernel = True
    while done < size:
        wanted = min(COPY_BYTES, size - done)
        if in_kernel:
            try:
                got = os.copy_file_range(source, target, wanted, source_offset + done, target_offset + done)
            except OSError:
                in_kernel = False  # file systems of different kinds; a real error comes back from the calls below
                continue
        else:
            piece = os.pread(source, wanted, source_offset + done)
            got = len(piece)
            view = memoryview(piece)
            while view:
                view = view[os.pwrite(target, view, target_offset + done + got - len(view)) :]
        if got == 0:
            raise DataError("a shard of the source ended while it was copied; the source is being changed")
        done += got
