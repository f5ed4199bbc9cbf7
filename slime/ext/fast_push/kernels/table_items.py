"""The rows of the tables: one matrix or view of a bucket and where its elements are, and the work on it in torch.

What the kernels write is compared with the functions here, and what no kernel covers is done by them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from slime.weights.quantize.block_fp8 import FP8, num_blocks, quantize_block

Kind = Literal["copy", "cast", "fp8_block", "fp8_block_ue8m0"]
KINDS = ("copy", "cast", "fp8_block", "fp8_block_ue8m0")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class CastItem:
    """One matrix of a bucket and where it comes from.

    Row ``r`` of the matrix is row ``r // row_run * run_stride + r % row_run`` of ``source``: rows that a layer keeps
    interleaved (q, k and v of every group of heads) are one item.  A matrix whose rows simply follow each other has
    ``row_run >= rows``, and its ``run_stride`` does not matter.
    """

    source: Tensor
    """``[source_rows, columns]``: a view of a live parameter, its last dimension contiguous.  The table reads this
    memory at every run; a parameter that has moved needs a new table."""
    row_run: int
    """Rows that lie one after the other."""
    run_stride: int
    """Rows of ``source`` from the start of one run to the start of the next."""
    rows: int
    out_offset: int
    """First byte in the bucket; a multiple of the element size."""
    kind: Kind
    """``copy``: the bytes as they are.  ``cast``: to the table's ``out_dtype``.  ``fp8_block``: as
    :func:`~slime.weights.quantize.block_fp8.quantize_block`; ``fp8_block_ue8m0``: the same with scales that are powers
    of two."""
    scale_offset: int | None = None
    """First byte of the fp32 scales ``[ceil(rows / block rows), ceil(columns / block columns)]``, row-major; only for
    the two kinds that have scales."""

    @property
    def columns(self) -> int:
        """Columns of the matrix."""
        return self.source.size(1)

    @property
    def is_fp8(self) -> bool:
        """True when the elements are written as FP8 with block scales."""
        return self.kind in ("fp8_block", "fp8_block_ue8m0")

    def segments(self, out_dtype: torch.dtype, block: tuple[int, int]) -> list[tuple[int, int]]:
        """Return offset and bytes of what is written: the matrix, then its scales if it has any."""
        found = [(self.out_offset, self.rows * self.columns * _out_dtype(self, out_dtype).itemsize)]
        if self.scale_offset is not None:
            found.append((self.scale_offset, 4 * math.prod(num_blocks(self.rows, self.columns, block))))
        return found


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
    """Dtype in the bucket; elements are cast when ``dst`` has another."""

    @property
    def end(self) -> int:
        """The first byte after the last element."""
        if self.dst.numel() == 0:
            return self.src_offset
        last = sum((size - 1) * stride for size, stride in zip(self.dst.shape, self.src_strides, strict=True))
        return self.src_offset + (last + 1) * self.src_dtype.itemsize


def check_bucket(bucket: Tensor, num_bytes: int, device: torch.device | None) -> None:
    """Refuse anything but a flat uint8 tensor of at least ``num_bytes``, on ``device`` unless that is None."""
    if bucket.dtype != torch.uint8 or bucket.dim() != 1 or not bucket.is_contiguous():
        raise ValueError(f"a bucket is a flat uint8 tensor; got {bucket.dtype} of shape {list(bucket.shape)}")
    if bucket.numel() < num_bytes:
        raise ValueError(f"the bucket has {bucket.numel()} bytes; the items of this table need {num_bytes}")
    if device is not None and bucket.device != device:
        raise ValueError(f"the bucket is on {bucket.device}; the tensors of this table on {device}")


def _out_dtype(item: CastItem, out_dtype: torch.dtype) -> torch.dtype:
    if item.is_fp8:
        return FP8
    return item.source.dtype if item.kind == "copy" else out_dtype


def check_cast(index: int, item: CastItem, out_dtype: torch.dtype) -> None:
    """Refuse an item that does not fit its source, or whose offsets are not aligned."""
    source = item.source
    what = f"item {index} ({item.kind}, {item.rows} rows of a source of {list(source.shape)}, {source.dtype})"
    if item.kind not in KINDS:
        raise ValueError(f"{what}: the kind is one of {', '.join(KINDS)}")
    if source.dim() != 2 or (source.size(1) > 1 and source.stride(1) != 1):
        raise ValueError(f"{what}: the source is a matrix with contiguous rows; strides {list(source.stride())}")
    if item.rows < 1 or item.row_run < 1 or source.size(1) < 1:
        raise ValueError(f"{what}: rows, row_run ({item.row_run}) and columns are positive")
    last = item.rows - 1
    if last // item.row_run * item.run_stride + last % item.row_run >= source.size(0):
        raise ValueError(f"{what}: runs of {item.row_run} rows every {item.run_stride} rows end beyond the source")
    if item.kind != "copy" and not source.is_floating_point():
        raise ValueError(f"{what}: only floating-point numbers are cast or quantized")
    if item.out_offset < 0 or item.out_offset % _out_dtype(item, out_dtype).itemsize:
        raise ValueError(f"{what}: the offset {item.out_offset} is no multiple of the element size")
    if item.is_fp8 != (item.scale_offset is not None):
        raise ValueError(f"{what}: a scale_offset belongs to the fp8 kinds, and to no other; got {item.scale_offset}")
    if item.scale_offset is not None and (item.scale_offset < 0 or item.scale_offset % 4):
        raise ValueError(f"{what}: the offset of the fp32 scales, {item.scale_offset}, is no multiple of 4")


def _rows_of(item: CastItem) -> Tensor:
    """Return the item's matrix, ``[rows, columns]``; a view where the rows follow each other."""
    if item.row_run >= item.rows:
        return item.source[: item.rows]
    row = torch.arange(item.rows, device=item.source.device)
    return item.source[row // item.row_run * item.run_stride + row % item.row_run]


def run_in_torch(item: CastItem, out: Tensor, out_dtype: torch.dtype, block: tuple[int, int]) -> None:
    """Write one item into the bucket, in plain torch: what the kernels are compared with."""
    matrix = _rows_of(item).detach()
    if item.is_fp8:
        assert item.scale_offset is not None  # checked
        quantized, scale = quantize_block(matrix, block, ue8m0=item.kind == "fp8_block_ue8m0")
        _write(out, item.out_offset, quantized)
        _write(out, item.scale_offset, scale)
    else:
        _write(out, item.out_offset, matrix.to(_out_dtype(item, out_dtype)))


def _write(out: Tensor, offset: int, values: Tensor) -> None:
    data = values.contiguous().view(-1).view(torch.uint8)
    out[offset : offset + data.numel()].copy_(data)


def differing_bytes(item: CopyItem, flat: Tensor) -> Tensor:
    """Count the differing bytes of one item, in plain torch."""
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
    """Return the item's elements in the bucket, as a view of the shape of ``dst``."""
    data = flat[item.src_offset : item.end].view(item.src_dtype)
    return data.as_strided(tuple(item.dst.shape), item.src_strides)


def check_copy(index: int, item: CopyItem) -> None:
    """Refuse an item whose strides or offset cannot be."""
    what = f"item {index} (to {list(item.dst.shape)}, {item.dst.dtype}, from {item.src_dtype})"
    if len(item.src_strides) != item.dst.dim():
        raise ValueError(f"{what}: {len(item.src_strides)} strides for {item.dst.dim()} dimensions")
    if any(stride < 0 for stride in item.src_strides):
        raise ValueError(f"{what}: negative strides {list(item.src_strides)}")
    if item.src_offset < 0 or item.src_offset % item.src_dtype.itemsize:
        raise ValueError(f"{what}: the offset {item.src_offset} is no multiple of the element size")
