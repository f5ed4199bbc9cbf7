"""``.safetensors`` files that are read by rows, and files whose tensors are written out of order.

Tensors are read and written in runs of rows (slices of the first dimension), so that memory does not grow with the
file, nor with the tensor.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.utils.errors import DataError
from slime.weights.stored_tensors import LENGTH_BYTES, TORCH_DTYPES, StoredTensor, TensorInfo

COPY_BYTES = 32 * 1024**2
CHUNK_BYTES = {"cpu": 1024**2, "cuda": 128 * 1024**2}
"""Of the source, at a time and worker: on a CPU what stays in its caches, on a GPU what keeps it busy."""
OPEN_FILES = 4
"""Shards of the source that one worker keeps open."""


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
    text += b" " * (-len(text) % LENGTH_BYTES)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}


def _itemsize(code: str) -> int:
    dtype = TORCH_DTYPES.get(code)
    return 1 if dtype is None else dtype.itemsize


def read_rows(
    descriptor: int, stored: StoredTensor, first: int = 0, count: int | None = None, *, pin: bool = False
) -> Tensor:
    """Return ``count`` rows of a tensor from ``first`` on (all that follow by default), on the CPU.

    Args:
        pin: into pinned memory, which a GPU copies from while this thread continues.

    Raises:
        DataError: the file ends before the tensor does.
    """
    count = stored.rows - first if count is None else count
    size = count * stored.row_bytes
    flat = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    view = flat.numpy().data
    done = 0
    while done < size:
        got = os.preadv(descriptor, [view[done:]], stored.begin + first * stored.row_bytes + done)
        if got == 0:
            raise DataError(f"{stored.file} ended inside {stored.name} while it was read; the source is being changed")
        done += got
    shape = (count, *stored.shape[1:]) if stored.shape else ()
    return flat.view(TORCH_DTYPES[stored.dtype]).view(shape)


class RowReader:
    """One worker's way to the source's tensors: open files, device, chunk size.

    A conversion reads through it; tensors come on the worker's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunk_bytes = CHUNK_BYTES[device.type]
        self._files: OrderedDict[Path, int] = OrderedDict()

    def __enter__(self) -> RowReader:
        return self

    def __exit__(self, *unused: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Return a stream of this worker, whose work on a GPU does not wait for the other workers."""
        if self._device.type != "cuda":
            yield
            return
        stream: torch.cuda.Stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            yield

    def descriptor(self, path: Path) -> int:
        """Return the open file; the least recently used one is closed."""
        if path not in self._files:
            while len(self._files) >= OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            self._files[path] = os.open(path, os.O_RDONLY)
        self._files.move_to_end(path)
        return self._files[path]

    def read(self, stored: StoredTensor, first: int = 0, count: int | None = None) -> Tensor:
        """Return some rows of a tensor, all by default, on the worker's device."""
        rows = read_rows(self.descriptor(stored.file), stored, first, count, pin=self._device.type == "cuda")
        return rows.to(self._device, non_blocking=True)

    def chunks(self, stored: StoredTensor, multiple: int = 1) -> Iterator[tuple[int, Tensor]]:
        """Yield runs of a tensor's rows with the first row of each; all but the last are a multiple of so many."""
        rows = stored.rows
        at_once = max(1, self._chunk_bytes // max(1, multiple * stored.row_bytes)) * multiple
        for first in range(0, rows, at_once):
            yield first, self.read(stored, first, min(at_once, rows - first))


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
