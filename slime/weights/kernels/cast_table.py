"""Live parameters into a flat bucket: every tensor of the bucket copied, cast or quantized by one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from slime.weights.digest import as_signed, digest_bytes
from slime.weights.quantize.block_fp8 import DEFAULT_BLOCK, FP8, num_blocks, quantize_block

Kind = Literal["copy", "cast", "fp8_block", "fp8_block_ue8m0"]
KINDS = ("copy", "cast", "fp8_block", "fp8_block_ue8m0")


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
    """Rows that lie one behind the other."""
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
        return self.source.size(1)

    @property
    def is_fp8(self) -> bool:
        return self.kind in ("fp8_block", "fp8_block_ue8m0")

    def segments(self, out_dtype: torch.dtype, block: tuple[int, int]) -> list[tuple[int, int]]:
        """Offset and bytes of what is written: the matrix, then its scales if it has any."""
        found = [(self.out_offset, self.rows * self.columns * _out_dtype(self, out_dtype).itemsize)]
        if self.scale_offset is not None:
            found.append((self.scale_offset, 4 * math.prod(num_blocks(self.rows, self.columns, block))))
        return found


class CastTable:
    """Writes its items into a bucket, as often as wanted.

    Args:
        items: of parameters on one device, or in pinned host memory.
        out_dtype: of the items that are cast.
        block: rows and columns that share a scale.
        use_triton: None takes Triton for CUDA tensors; True is for tests of the kernels in Triton's interpreter.
        device: where the bucket lies; None for where the items do.  A GPU reads pinned host memory over the bus.
        segments: offset and bytes of what :meth:`run_with_digests` gives digests of; None for every matrix and every
            array of scales, in the order of the items.

    Raises:
        ValueError: an item does not fit its source, its offsets are not aligned, or devices differ.
    """

    def __init__(
        self,
        items: Sequence[CastItem],
        out_dtype: torch.dtype,
        block: tuple[int, int] = DEFAULT_BLOCK,
        *,
        use_triton: bool | None = None,
        device: torch.device | None = None,
        segments: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.items = tuple(items)
        self.out_dtype = out_dtype
        self.block = block
        for index, item in enumerate(self.items):
            _check(index, item, out_dtype)
        devices = {item.source.device for item in self.items}
        if len(devices) > 1:
            raise ValueError(f"the items of one table lie on {sorted(map(str, devices))}; one table, one device")
        self.device = device or (devices.pop() if devices else None)
        for index, item in enumerate(self.items):
            source = item.source
            if source.device != self.device and not (source.device.type == "cpu" and source.is_pinned()):
                raise ValueError(
                    f"item {index} lies on {source.device}, which {self.device} cannot read; only host memory that is "
                    "pinned can be read from there"
                )
        own = [segment for item in self.items for segment in item.segments(out_dtype, block)]
        self.segments = own if segments is None else list(segments)
        self.num_bytes = max((offset + size for offset, size in (*own, *self.segments)), default=0)
        """Bytes that the bucket must have."""
        self.bytes_read = sum(item.rows * item.columns * item.source.element_size() for item in self.items)
        self.bytes_written = sum(size for _, size in own)

        if use_triton is None:
            use_triton = self.device is not None and self.device.type == "cuda"
        self._launch: Any = None
        if use_triton and self.items:
            # Triton comes with torch for CUDA only.
            from slime.weights.kernels.triton_cast import CastLaunch

            self._launch = CastLaunch(self.items, out_dtype, block, self.segments, device=self.device)

    def run(self, out: Tensor) -> None:
        """Fill the bucket ``out`` (flat, uint8, at least :attr:`num_bytes`) from what the parameters hold now.

        Bytes between the items are left as they are.  On a GPU this returns before the work is done.

        Raises:
            ValueError: ``out`` is too small, not flat bytes, or on another device.
        """
        check_bucket(out, self.num_bytes, self.device)
        if self._launch is not None:
            self._launch.run(out)
            return
        for item in self.items:
            run_in_torch(item, out, self.out_dtype, self.block)

    def run_with_digests(self, out: Tensor) -> Tensor:
        """As :meth:`run`, and the digests of the :attr:`segments`: those of ``DigestTable``, at less than its cost.

        Returns:
            int64 ``[segments]``, the unsigned values wrapped (``digest_table.as_unsigned``).

        Raises:
            ValueError: as :meth:`run`.
        """
        check_bucket(out, self.num_bytes, self.device)
        if self._launch is not None:
            return self._launch.run_with_digests(out)
        self.run(out)
        digests = [digest_bytes(out[offset : offset + size]) for offset, size in self.segments]
        return torch.tensor([as_signed(digest) for digest in digests], dtype=torch.int64, device=out.device)


def check_bucket(bucket: Tensor, num_bytes: int, device: torch.device | None) -> None:
    """Refuse anything but a flat uint8 tensor of at least ``num_bytes``, on ``device`` unless that is None."""
    if bucket.dtype != torch.uint8 or bucket.dim() != 1 or not bucket.is_contiguous():
        raise ValueError(f"a bucket is a flat uint8 tensor; got {bucket.dtype} of shape {list(bucket.shape)}")
    if bucket.numel() < num_bytes:
        raise ValueError(f"the bucket has {bucket.numel()} bytes; the items of this table need {num_bytes}")
    if device is not None and bucket.device != device:
        raise ValueError(f"the bucket lies on {bucket.device}; the tensors of this table on {device}")


def _out_dtype(item: CastItem, out_dtype: torch.dtype) -> torch.dtype:
    if item.is_fp8:
        return FP8
    return item.source.dtype if item.kind == "copy" else out_dtype


def _check(index: int, item: CastItem, out_dtype: torch.dtype) -> None:
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
        raise ValueError(f"{what}: runs of {item.row_run} rows every {item.run_stride} rows end behind the source")
    if item.kind != "copy" and not source.is_floating_point():
        raise ValueError(f"{what}: only floating-point numbers are cast or quantized")
    if item.out_offset < 0 or item.out_offset % _out_dtype(item, out_dtype).itemsize:
        raise ValueError(f"{what}: the offset {item.out_offset} is no multiple of the element size")
    if item.is_fp8 != (item.scale_offset is not None):
        raise ValueError(f"{what}: a scale_offset belongs to the fp8 kinds, and to no other; got {item.scale_offset}")
    if item.scale_offset is not None and (item.scale_offset < 0 or item.scale_offset % 4):
        raise ValueError(f"{what}: the offset of the fp32 scales, {item.scale_offset}, is no multiple of 4")


def _rows_of(item: CastItem) -> Tensor:
    """The item's matrix, ``[rows, columns]``; a view where the rows follow each other."""
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
