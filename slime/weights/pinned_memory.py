"""Host memory from and to which an accelerator copies directly, while the caller continues."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 512
"""Of the first byte of each tensor that shares memory with others."""


def host_bytes(num_bytes: int, *, is_pinned: bool) -> Tensor:
    """Return zeros on the host, [num_bytes], uint8.

    Torch's own pinned memory is rounded up to a power of two, and one thread touches its pages, half a second for each
    GiB.  Here all threads of torch touch them, and the pages are huge where the system has such.

    Args:
        is_pinned: needs CUDA; the memory is released with the last tensor in it.
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
    """Return tensors on the host of the shapes and dtypes of ``tensors``, in one block of memory."""
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
    """Return ``num_bytes``, rounded up to :data:`ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class _PinnedPages(mmap.mmap):
    """Pages that stay registered with CUDA as long as they live."""

    _address: int | None = None
    _runtime: Any = None

    def pin(self, address: int) -> None:
        """Register the pages, which begin at ``address``; raises ``torch.cuda.CudaError`` where CUDA refuses."""
        self._runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(self._runtime.cudaHostRegister(address, len(self), 0))
        self._address = address

    def __del__(self) -> None:
        if self._address is not None:
            self._runtime.cudaHostUnregister(self._address)  # fails at most where CUDA has ended, and with it the pins
