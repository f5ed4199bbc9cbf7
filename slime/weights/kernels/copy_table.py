"""A flat bucket into an engine's parameters, and the comparison of both: few launches for all tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.weights.kernels.cast_table import check_bucket

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class CopyItem:
    """One rectangle of an engine's parameters and where in the bucket its elements are."""

    dst: Tensor
    """Any view of a live parameter, any strides.  The table writes this memory at every copy; a parameter that has
    moved needs a new table."""
    src_offset: int
    """First byte of element 0 in the bucket; a multiple of the source's element size."""
    src_strides: tuple[int, ...]
    """Elements in the bucket from one index of ``dst`` to the next, for each of its dimensions."""
    src_dtype: torch.dtype
    """What the bucket holds; elements are cast when ``dst`` has another."""

    @property
    def end(self) -> int:
        """The first byte behind the last element."""
        if self.dst.numel() == 0:
            return self.src_offset
        last = sum((size - 1) * stride for size, stride in zip(self.dst.shape, self.src_strides, strict=True))
        return self.src_offset + (last + 1) * self.src_dtype.itemsize


class CopyTable:
    """Copies a bucket into its items, or compares them with it, as often as wanted.

    Args:
        items: destinations on one device; no element is in two of them.
        use_triton: None takes Triton for CUDA tensors; True is for tests of the kernels in Triton's interpreter.

    Raises:
        ValueError: strides and dimensions of an item differ in number, an offset is not aligned, or devices differ.
    """

    def __init__(self, items: Sequence[CopyItem], *, use_triton: bool | None = None) -> None:
        self.items = tuple(items)
        for index, item in enumerate(self.items):
            _check(index, item)
        devices = {item.dst.device for item in self.items}
        if len(devices) > 1:
            raise ValueError(f"the items of one table lie on {sorted(map(str, devices))}; one table, one device")
        self.device = devices.pop() if devices else None
        self.num_bytes = max((item.end for item in self.items), default=0)
        """Bytes that the bucket must have."""
        self.bytes_read = sum(item.dst.numel() * item.src_dtype.itemsize for item in self.items)
        self.bytes_written = sum(item.dst.numel() * item.dst.element_size() for item in self.items)

        if use_triton is None:
            use_triton = self.device is not None and self.device.type == "cuda"
        self._launch: Any = None
        if use_triton and self.items:
            # Triton comes with torch for CUDA only.
            from slime.weights.kernels.triton_copy import CopyLaunch

            self._launch = CopyLaunch(self.items)

    def copy(self, flat: Tensor) -> None:
        """Write every item from the bucket ``flat`` (flat, uint8).

        The bucket may lie in the memory of another GPU that this one can reach.  On a GPU this returns before the work
        is done.

        Raises:
            ValueError: ``flat`` is too small or not flat bytes.
        """
        check_bucket(flat, self.num_bytes, None)
        if self._launch is not None:
            self._launch.copy(flat)
            return
        for item in self.items:
            item.dst.detach().copy_(source_view(item, flat))

    def count_differences(self, flat: Tensor) -> Tensor:
        """How many bytes of each destination are not what :meth:`copy` would write.

        Returns:
            int64 ``[items]`` on the device of the destinations; on a GPU before the work is done.

        Raises:
            ValueError: as :meth:`copy`.
        """
        check_bucket(flat, self.num_bytes, None)
        if self._launch is not None:
            return self._launch.count_differences(flat)
        counts = torch.zeros(len(self.items), dtype=torch.int64, device=self.device)
        for index, item in enumerate(self.items):
            counts[index] = differing_bytes(item, flat)
        return counts


def differing_bytes(item: CopyItem, flat: Tensor) -> Tensor:
    """The count of one item, in plain torch."""
    held, expected = item.dst.detach(), source_view(item, flat)
    if held.device.type == "cpu" and held.dtype == expected.dtype and _are_equal(held, expected):
        return torch.zeros((), dtype=torch.int64)
    expected = expected.to(device=held.device, dtype=held.dtype)
    return (held.contiguous().view(-1).view(torch.uint8) != expected.contiguous().view(-1).view(torch.uint8)).sum()


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Compare the bytes of two tensors of one shape and dtype without temporary ones."""
    if all(t.is_contiguous() and t.nbytes % 8 == 0 and t.data_ptr() % 8 == 0 for t in (one, other)):
        return torch.equal(one.view(-1).view(torch.int64), other.view(-1).view(torch.int64))
    word = _WORDS[one.element_size()]
    return torch.equal(one.view(word), other.view(word))


def source_view(item: CopyItem, flat: Tensor) -> Tensor:
    """The item's elements in the bucket, as a view of the shape of ``dst``."""
    data = flat[item.src_offset : item.end].view(item.src_dtype)
    return data.as_strided(tuple(item.dst.shape), item.src_strides)


def _check(index: int, item: CopyItem) -> None:
    what = f"item {index} (to {list(item.dst.shape)}, {item.dst.dtype}, from {item.src_dtype})"
    if len(item.src_strides) != item.dst.dim():
        raise ValueError(f"{what}: {len(item.src_strides)} strides for {item.dst.dim()} dimensions")
    if any(stride < 0 for stride in item.src_strides):
        raise ValueError(f"{what}: negative strides {list(item.src_strides)}")
    if item.src_offset < 0 or item.src_offset % item.src_dtype.itemsize:
        raise ValueError(f"{what}: the offset {item.src_offset} is no multiple of the element size")
