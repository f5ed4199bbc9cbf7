"""Tables of small operations on a bucket; each table is built once and run by every push in one launch.

CastTable     copies, casts or quantizes live parameters into a flat bucket
CopyTable     copies a flat bucket into an engine's parameters, or compares the two
DigestTable   computes 64-bit digests of segments of a bucket, as ``slime.weights.digest.digest_bytes`` does

An item describes one row of a table.  The torch functions below are the reference for the kernels in tests, and handle
the cases that no kernel covers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from slime.weights.digest import MASK_64, as_signed, digest_bytes
from slime.weights.quantize.block_fp8 import DEFAULT_BLOCK, FP8, num_blocks, quantize_block

Kind = Literal["copy", "cast", "fp8_block", "fp8_block_ue8m0"]
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class CastItem:
    """One matrix of a bucket and its source.

    Row ``r`` of the matrix is row ``r // row_run * run_stride + r % row_run`` of ``source``, so that rows which a
    layer stores interleaved (q, k and v of every group of heads) form one item.  If the rows are consecutive in the
    source, ``row_run >= rows`` and ``run_stride`` is unused.
    """

    source: Tensor
    """``[source_rows, columns]``: a view of a live parameter, contiguous in its last dimension.  The table reads this
    memory at every run; if the parameter moves, the table must be rebuilt."""
    row_run: int
    """Number of consecutive rows in each run."""
    run_stride: int
    """Rows of ``source`` from the start of one run to the start of the next."""
    rows: int
    out_offset: int
    """First byte in the bucket; a multiple of the element size."""
    kind: Kind
    """``copy``: the bytes unchanged.  ``cast``: to the table's ``out_dtype``.  ``fp8_block``: quantized as by
    :func:`~slime.weights.quantize.block_fp8.quantize_block`; ``fp8_block_ue8m0``: the same with power-of-two
    scales."""
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
        """Return ``(offset, bytes)`` of the written matrix, and of its scales if it has any."""
        found = [(self.out_offset, self.rows * self.columns * _out_dtype(self, out_dtype).itemsize)]
        if self.scale_offset is not None:
            found.append((self.scale_offset, 4 * math.prod(num_blocks(self.rows, self.columns, block))))
        return found


@dataclass(frozen=True, slots=True)
class CopyItem:
    """A view of an engine's parameter, and where its elements are in the bucket."""

    dst: Tensor
    """A view of a live parameter, of any strides.  The table writes this memory at every copy; if the parameter moves,
    the table must be rebuilt."""
    src_offset: int
    """First byte of element 0 in the bucket; a multiple of the source's element size."""
    src_strides: tuple[int, ...]
    """Strides in the bucket, in elements, one for each dimension of ``dst``."""
    src_dtype: torch.dtype
    """Dtype in the bucket; elements are cast if ``dst`` has another dtype."""

    @property
    def end(self) -> int:
        """Offset of the first byte after the last element."""
        if self.dst.numel() == 0:
            return self.src_offset
        last = sum((size - 1) * stride for size, stride in zip(self.dst.shape, self.src_strides, strict=True))
        return self.src_offset + (last + 1) * self.src_dtype.itemsize


def _check_bucket(bucket: Tensor, num_bytes: int, device: torch.device | None) -> None:
    """Check that a tensor is flat uint8 with at least ``num_bytes``, on ``device`` unless that is None."""
    if bucket.dtype != torch.uint8 or bucket.dim() != 1 or not bucket.is_contiguous():
        raise ValueError(f"a bucket is a flat uint8 tensor; got {bucket.dtype} of shape {list(bucket.shape)}")
    if bucket.numel() < num_bytes:
        raise ValueError(f"the bucket has {bucket.numel()} bytes; this table needs {num_bytes}")
    if device is not None and bucket.device != device:
        raise ValueError(f"the bucket is on {bucket.device}; the tensors of this table are on {device}")


def _out_dtype(item: CastItem, out_dtype: torch.dtype) -> torch.dtype:
    if item.is_fp8:
        return FP8
    return item.source.dtype if item.kind == "copy" else out_dtype


def _rows_of(item: CastItem) -> Tensor:
    """Return the item's matrix, ``[rows, columns]``; a view if its rows are consecutive."""
    if item.row_run >= item.rows:
        return item.source[: item.rows]
    row = torch.arange(item.rows, device=item.source.device)
    return item.source[row // item.row_run * item.run_stride + row % item.row_run]


def run_in_torch(item: CastItem, out: Tensor, out_dtype: torch.dtype, block: tuple[int, int]) -> None:
    """Write one item into the bucket in plain torch, as the reference for the kernels."""
    matrix = _rows_of(item).detach()
    if item.is_fp8:
        assert item.scale_offset is not None
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
    """Return whether two tensors of equal shape and dtype have equal bytes, without temporary tensors."""
    if all(t.is_contiguous() and t.nbytes % 8 == 0 and t.data_ptr() % 8 == 0 for t in (one, other)):
        return torch.equal(one.view(-1).view(torch.int64), other.view(-1).view(torch.int64))
    word = _WORDS[one.element_size()]
    return torch.equal(one.view(word), other.view(word))


def source_view(item: CopyItem, flat: Tensor) -> Tensor:
    """Return a view of the item's elements in the bucket, in the shape of ``dst``."""
    data = flat[item.src_offset : item.end].view(item.src_dtype)
    return data.as_strided(tuple(item.dst.shape), item.src_strides)


class CastTable:
    """Writes its items into a bucket; reusable.

    Args:
        items: the sources are on one device, or in pinned host memory.
        out_dtype: dtype of items of the kind ``cast``.
        block: rows and columns of an FP8 block, which shares a scale.
        use_triton: None selects Triton for CUDA tensors; True is for tests in Triton's interpreter.
        device: device of the bucket; None for the device of the items.  A GPU reads pinned host memory over the bus.
        segments: ``(offset, bytes)`` of the segments that :meth:`run_with_digests` digests; None for every matrix and
            every array of scales, in the order of the items.
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
        self.device = device or (self.items[0].source.device if self.items else None)
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
            from slime.ext.fast_push.kernels.triton_cast import CastLaunch

            self._launch = CastLaunch(self.items, out_dtype, block, self.segments, device=self.device)

    def run(self, out: Tensor) -> None:
        """Fill the bucket ``out`` (flat, uint8, at least :attr:`num_bytes`) from the current parameters.

        Bytes between the items stay unchanged.  On a GPU the work is asynchronous.

        Raises:
            ValueError: ``out`` is too small, not flat bytes, or on another device.
        """
        _check_bucket(out, self.num_bytes, self.device)
        if self._launch is not None:
            self._launch.run(out)
            return
        for item in self.items:
            run_in_torch(item, out, self.out_dtype, self.block)

    def run_with_digests(self, out: Tensor) -> Tensor:
        """Run, and return the digests of the :attr:`segments`, at a lower cost than a ``DigestTable``.

        Returns:
            int64 ``[segments]``: unsigned values stored as signed (see :func:`as_unsigned`).

        Raises:
            ValueError: as :meth:`run`.
        """
        _check_bucket(out, self.num_bytes, self.device)
        if self._launch is not None:
            return self._launch.run_with_digests(out)
        self.run(out)
        digests = [digest_bytes(out[offset : offset + size]) for offset, size in self.segments]
        return torch.tensor([as_signed(digest) for digest in digests], dtype=torch.int64, device=out.device)


class CopyTable:
    """Copies a bucket into its items, or compares the two; reusable.

    Args:
        items: the destinations are on one device and do not overlap.
        use_triton: None selects Triton for CUDA tensors; True is for tests in Triton's interpreter.
    """

    def __init__(self, items: Sequence[CopyItem], *, use_triton: bool | None = None) -> None:
        self.items = tuple(items)
        self.device = self.items[0].dst.device if self.items else None
        self.num_bytes = max((item.end for item in self.items), default=0)
        """Bytes that the bucket must have."""
        self.bytes_read = sum(item.dst.numel() * item.src_dtype.itemsize for item in self.items)
        self.bytes_written = sum(item.dst.numel() * item.dst.element_size() for item in self.items)

        if use_triton is None:
            use_triton = self.device is not None and self.device.type == "cuda"
        self._launch: Any = None
        if use_triton and self.items:
            # Triton comes with torch for CUDA only.
            from slime.ext.fast_push.kernels.triton_copy import CopyLaunch

            self._launch = CopyLaunch(self.items)

    def copy(self, flat: Tensor) -> None:
        """Write every item from the bucket ``flat`` (flat, uint8).

        The bucket may be in the memory of another GPU that this one can access.  On a GPU the work is asynchronous.

        Raises:
            ValueError: ``flat`` is too small or not flat bytes.
        """
        _check_bucket(flat, self.num_bytes, None)
        if self._launch is not None:
            self._launch.copy(flat)
            return
        for item in self.items:
            item.dst.detach().copy_(source_view(item, flat))

    def count_differences(self, flat: Tensor) -> Tensor:
        """Count the bytes of each destination that differ from the bytes :meth:`copy` would write.

        Returns:
            int64 ``[items]`` on the device of the destinations; on a GPU the work is asynchronous.

        Raises:
            ValueError: as :meth:`copy`.
        """
        _check_bucket(flat, self.num_bytes, None)
        if self._launch is not None:
            return self._launch.count_differences(flat)
        counts = torch.zeros(len(self.items), dtype=torch.int64, device=self.device)
        for index, item in enumerate(self.items):
            counts[index] = differing_bytes(item, flat)
        return counts


class DigestTable:
    """Computes digests of fixed segments of a bucket; reusable for further buckets.

    Args:
        offsets: first byte of each segment; on a GPU a multiple of 8.
        lengths: bytes of each segment.
        use_triton: None selects Triton on CUDA; True is for tests in Triton's interpreter.
    """

    def __init__(
        self,
        offsets: Sequence[int],
        lengths: Sequence[int],
        device: torch.device | str,
        *,
        use_triton: bool | None = None,
    ) -> None:
        self.offsets = list(offsets)
        self.lengths = list(lengths)
        self.device = torch.device(device)
        self.num_bytes = max((begin + length for begin, length in zip(offsets, lengths)), default=0)
        """Bytes that the bucket must have."""
        if use_triton is None:
            use_triton = self.device.type == "cuda"
        self._launch: Any = None
        if use_triton and self.offsets:
            # Triton comes with torch for CUDA only.
            from slime.ext.fast_push.kernels.triton_digest import DigestLaunch

            self._launch = DigestLaunch(self.offsets, self.lengths, self.device)

    def run(self, flat: Tensor) -> Tensor:
        """Return the digests of the segments of ``flat`` (flat, uint8), asynchronously on a GPU.

        Returns:
            int64 ``[segments]``: unsigned values stored as signed (see :func:`as_unsigned`).

        Raises:
            ValueError: ``flat`` is too small or not flat bytes.
        """
        _check_bucket(flat, self.num_bytes, None)
        if self._launch is not None:
            return self._launch.run(flat)
        values = [digest_bytes(flat[begin : begin + size]) for begin, size in zip(self.offsets, self.lengths)]
        return torch.tensor([as_signed(value) for value in values], dtype=torch.int64, device=flat.device)


def as_unsigned(digests: Tensor) -> list[int]:
    """Return the digests as unsigned ints, like ``digest_bytes``.  Synchronizes with the device."""
    return [value & MASK_64 for value in digests.tolist()]
