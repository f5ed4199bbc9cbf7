"""Pinned host memory, for asynchronous copies to and from an accelerator."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 512
"""Byte alignment of each tensor in a shared block."""


def host_bytes(num_bytes: int, *, is_pinned: bool) -> Tensor:
    """Return host zeros, uint8 of shape ``[num_bytes]``.

    torch rounds its own pinned memory up to a power of two, and a single thread touches the pages, which takes half a
    second per GiB.  Here all of torch's threads touch them, and the kernel is asked for huge pages.

    Args:
        is_pinned: pin the memory (needs CUDA); it is released with the last tensor that refers to it.
    """
    if not is_pinned or num_bytes == 0:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    pages = _PinnedPages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    room = torch.frombuffer(pages, dtype=torch.uint8).zero_()
    pages.pin(room.data_ptr())
    return room


def host_tensors_like(tensors: Mapping[str, Tensor], *, is_pinned: bool) -> dict[str, Tensor]:
    """Return host tensors with the shapes and dtypes of ``tensors``, allocated in one block."""
    begins, size = [], 0
    for tensor in tensors.values():
        begins.append(size)
        size += aligned(tensor.nbytes)
    room = host_bytes(size, is_pinned=is_pinned)
    return {
        name: room[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for (name, tensor), begin in zip(tensors.items(), begins, strict=True)
    }


def aligned(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to a multiple of :data:`ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class _PinnedPages(mmap.mmap):
    """Pages that stay registered with CUDA for their lifetime."""

    _address: int | None = None
    _runtime: Any = None

    def pin(self, address: int) -> None:
        """Register the pages, which begin at ``address``; raises ``torch.cuda.CudaError`` if CUDA refuses."""
        self._runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(self._runtime.cudaHostRegister(address, len(self), 0))
        self._address = address

    def __del__(self) -> None:
        if self._address is not None:
            self._runtime.cudaHostUnregister(self._address)  # fails only after CUDA shut down, which unpins
