"""Copying, casting and comparing tiles of matrices, shared by the tables' kernels; and the kernel of ``CopyTable``.

A *form* is the way in which a descriptor's elements are read and written.  Kernels are compiled for the forms that a
table has, given as a bit mask; unused forms cost no registers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from slime.ext.fast_push.kernels.copy_2d import (
    VECTOR_BYTES,
    VECTOR_WORDS,
    Copy2D,
    as_lines,
    in_words,
    matrices,
    tile_index,
)
from slime.ext.fast_push.kernels.tables import CopyItem, differing_bytes, source_view

COPY_ROWS, COPY_COLUMNS, COPY_WARPS = 8, 256, 4
"""Tile of a copy, in four-byte words or elements, and warps of its program: the fastest on an H100."""

# Fields of a descriptor, a row of int64; the same in every table.
FORM = tl.constexpr(0)
FIRST_TILE = tl.constexpr(1)
TILES_PER_ROW = tl.constexpr(2)
ROWS = tl.constexpr(3)
COLUMNS = tl.constexpr(4)
SRC = tl.constexpr(5)
SRC_ROW = tl.constexpr(6)
SRC_COLUMN = tl.constexpr(7)
DST = tl.constexpr(8)
DST_ROW = tl.constexpr(9)
DST_COLUMN = tl.constexpr(10)
LAST = tl.constexpr(11)
POSITION = tl.constexpr(12)
FIELDS = tl.constexpr(13)

# Forms are bits, so that the forms of a table combine into a mask.
WORDS = tl.constexpr(1 << 0)
"""Unchanged bytes of vector-aligned, contiguous rows; lengths and row strides are in vectors."""
SIZE_1, SIZE_2 = tl.constexpr(1 << 1), tl.constexpr(1 << 2)
"""Unchanged elements, by their size in bytes."""
SIZE_4, SIZE_8 = tl.constexpr(1 << 3), tl.constexpr(1 << 4)
BF16_TO_FP16, BF16_TO_FP32 = tl.constexpr(1 << 5), tl.constexpr(1 << 6)
FP16_TO_BF16, FP16_TO_FP32 = tl.constexpr(1 << 7), tl.constexpr(1 << 8)
FP32_TO_BF16, FP32_TO_FP16 = tl.constexpr(1 << 9), tl.constexpr(1 << 10)
NUM_MOVES = 11
MOVES = tl.constexpr((1 << NUM_MOVES) - 1)

SAME = {1: SIZE_1, 2: SIZE_2, 4: SIZE_4, 8: SIZE_8}
CASTS = {
    (torch.bfloat16, torch.float16): BF16_TO_FP16,
    (torch.bfloat16, torch.float32): BF16_TO_FP32,
    (torch.float16, torch.bfloat16): FP16_TO_BF16,
    (torch.float16, torch.float32): FP16_TO_FP32,
    (torch.float32, torch.bfloat16): FP32_TO_BF16,
    (torch.float32, torch.float16): FP32_TO_FP16,
}
UNIT = tl.constexpr(VECTOR_WORDS)


@triton.jit
def _bytes_that_differ(a, b, SIZE: tl.constexpr):
    """Count the bytes that differ between two tiles of unsigned integers of SIZE bytes."""
    difference = a ^ b
    count = tl.sum((difference != 0).to(tl.int32))
    if count > 0:
        total = tl.zeros(difference.shape, tl.int32)
        for index in tl.static_range(SIZE):
            total += (((difference >> (8 * index)) & 255) != 0).to(tl.int32)
        count = tl.sum(total)
    return count


@triton.jit
def load_descriptor(table):
    """Load all fields of a descriptor at once, so that their latencies overlap."""
    return (
        tl.load(table + FORM).to(tl.int32),
        tl.load(table + FIRST_TILE).to(tl.int32),
        tl.load(table + TILES_PER_ROW).to(tl.int32),
        tl.load(table + ROWS).to(tl.int32),
        tl.load(table + COLUMNS).to(tl.int32),
        tl.load(table + SRC),
        tl.load(table + SRC_ROW),
        tl.load(table + SRC_COLUMN),
        tl.load(table + DST),
        tl.load(table + DST_ROW),
        tl.load(table + DST_COLUMN),
        tl.load(table + LAST),
        tl.load(table + POSITION),
    )


@triton.jit
def _move(
    descriptor, row, column, base_src, base_dst, FROM: tl.constexpr, TO: tl.constexpr, BITS: tl.constexpr,
    SIZE: tl.constexpr, UNIT: tl.constexpr, COMPARE: tl.constexpr,
):  # fmt: skip
    """Move a tile in one form.

    FROM, TO: dtypes that are read and written.  SIZE: bytes of TO.  BITS: the unsigned integer of that size.
    UNIT: elements per unit of the descriptor's lengths and strides.
    """
    _, _, _, rows, columns, _, src_row, src_column, _, dst_row, dst_column, _, _ = descriptor
    src = base_src.to(tl.pointer_type(FROM), bitcast=True)
    dst = base_dst.to(tl.pointer_type(TO), bitcast=True)
    if UNIT > 1:
        src = tl.multiple_of(src, UNIT * SIZE) + row * (src_row * UNIT) + column
        dst = tl.multiple_of(dst, UNIT * SIZE) + row * (dst_row * UNIT) + column
    else:
        src += row * src_row + column * src_column
        dst += row * dst_row + column * dst_column
    mask = (row < rows) & (column < columns * UNIT)
    value = tl.load(src, mask=mask, other=0)
    if FROM != TO:
        value = value.to(tl.float32).to(TO)
    count = tl.full((), 0, tl.int32)
    if COMPARE:
        held = tl.load(dst, mask=mask, other=0)
        count = _bytes_that_differ(value.to(BITS, bitcast=True), held.to(BITS, bitcast=True), SIZE)
    else:
        tl.store(dst, value, mask=mask)
    return count


@triton.jit
def move_tile(  # noqa: C901 - one branch for each form
    descriptor, tile, base_src, base_dst, FORMS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    COMPARE: tl.constexpr,
):  # fmt: skip
    """Copy or cast one tile of a descriptor; with COMPARE only count the bytes that would change.

    Args:
        base_src, base_dst: byte pointers to element (0, 0).

    Returns:
        Bytes that differ; 0 without COMPARE.
    """
    form = descriptor[0]
    across = descriptor[2]
    # A row times its stride may exceed 2**31.
    row = ((tile // across).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS))[:, None]
    column = (tile % across * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS))[None, :]
    count = tl.full((), 0, tl.int32)
    # The outer conditions are constexpr: forms outside FORMS are not compiled.
    if WORDS & FORMS:
        if form == WORDS:
            count = _move(
                descriptor, row, column, base_src, base_dst, tl.uint32, tl.uint32, tl.uint32, 4, UNIT, COMPARE
            )
    if SIZE_1 & FORMS:
        if form == SIZE_1:
            count = _move(descriptor, row, column, base_src, base_dst, tl.uint8, tl.uint8, tl.uint8, 1, 1, COMPARE)
    if SIZE_2 & FORMS:
        if form == SIZE_2:
            count = _move(descriptor, row, column, base_src, base_dst, tl.uint16, tl.uint16, tl.uint16, 2, 1, COMPARE)
    if SIZE_4 & FORMS:
        if form == SIZE_4:
            count = _move(descriptor, row, column, base_src, base_dst, tl.uint32, tl.uint32, tl.uint32, 4, 1, COMPARE)
    if SIZE_8 & FORMS:
        if form == SIZE_8:
            count = _move(descriptor, row, column, base_src, base_dst, tl.uint64, tl.uint64, tl.uint64, 8, 1, COMPARE)
    if BF16_TO_FP16 & FORMS:
        if form == BF16_TO_FP16:
            count = _move(
                descriptor, row, column, base_src, base_dst, tl.bfloat16, tl.float16, tl.uint16, 2, 1, COMPARE
            )
    if BF16_TO_FP32 & FORMS:
        if form == BF16_TO_FP32:
            count = _move(
                descriptor, row, column, base_src, base_dst, tl.bfloat16, tl.float32, tl.uint32, 4, 1, COMPARE
            )
    if FP16_TO_BF16 & FORMS:
        if form == FP16_TO_BF16:
            count = _move(
                descriptor, row, column, base_src, base_dst, tl.float16, tl.bfloat16, tl.uint16, 2, 1, COMPARE
            )
    if FP16_TO_FP32 & FORMS:
        if form == FP16_TO_FP32:
            count = _move(
                descriptor, row, column, base_src, base_dst, tl.float16, tl.float32, tl.uint32, 4, 1, COMPARE
            )
    if FP32_TO_BF16 & FORMS:
        if form == FP32_TO_BF16:
            count = _move(
                descriptor, row, column, base_src, base_dst, tl.float32, tl.bfloat16, tl.uint16, 2, 1, COMPARE
            )
    if FP32_TO_FP16 & FORMS:
        if form == FP32_TO_FP16:
            count = _move(
                descriptor, row, column, base_src, base_dst, tl.float32, tl.float16, tl.uint16, 2, 1, COMPARE
            )
    return count


def form_of(src_dtype: torch.dtype, dst_dtype: torch.dtype) -> int | None:
    """Return the form that moves single elements; None for a cast without a kernel."""
    same = src_dtype == dst_dtype
    form = SAME.get(src_dtype.itemsize) if same else CASTS.get((src_dtype, dst_dtype))
    return None if form is None else form.value


def move_descriptors(
    matrix: Copy2D, src_dtype: torch.dtype, dst_dtype: torch.dtype, tile: tuple[int, int], last: int
) -> tuple[list[list[int]], list[int]]:
    """Return the descriptors of one matrix, in the widest form that fits, and the number of tiles of each.

    Args:
        src_dtype, dst_dtype: a pair for which :func:`form_of` is not None.
        tile: rows and columns of a tile, in words or elements.
        last: value of the field LAST.
    """
    words = in_words(matrix, src_dtype.itemsize) if src_dtype == dst_dtype else None
    parts = words or as_lines(matrix, src_dtype.itemsize, dst_dtype.itemsize)
    scale, form = (VECTOR_WORDS, WORDS.value) if words else (1, form_of(src_dtype, dst_dtype))
    assert form is not None  # checked by the caller
    descriptors, counts = [], []
    for part in parts:
        across = -(-part.columns // tile[1])
        counts.append(-(-part.rows // tile[0]) * across)
        descriptors.append(
            [form, 0, across, part.rows, part.columns // scale]
            + [part.src, part.src_strides[0] // scale, part.src_strides[1]]
            + [part.dst, part.dst_strides[0] // scale, part.dst_strides[1], last, 0]
        )
    return descriptors, counts


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return the context to launch kernels in; tests pass CPU tensors to Triton's interpreter."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@triton.jit
def _copy_kernel(
    flat, owner, table, counts, FORMS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    COMPARE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    descriptor = load_descriptor(table + tl.load(owner + program).to(tl.int64) * FIELDS)
    _, first, _, _, _, src, _, _, dst, _, _, item, _ = descriptor
    dst = dst.to(tl.pointer_type(tl.uint8))
    count = move_tile(descriptor, program - first, flat + src, dst, FORMS, TILE_ROWS, TILE_COLUMNS, COMPARE)
    if COMPARE:
        if count > 0:
            tl.atomic_add(counts + item, count.to(tl.int64))


class CopyLaunch:
    """A ``CopyTable``'s descriptors, on the items' device."""

    def __init__(self, items: Sequence[CopyItem]) -> None:
        self.items = items
        self.device = items[0].dst.device
        self.in_torch: list[int] = []
        """Indices of the items whose cast has no kernel."""
        descriptors: list[list[int]] = []
        tiles: list[int] = []
        for index, item in enumerate(items):
            if form_of(item.src_dtype, item.dst.dtype) is None:
                self.in_torch.append(index)
                continue
            for matrix in matrices(
                item.dst.shape,
                item.src_offset,
                item.src_strides,
                item.src_dtype.itemsize,
                item.dst.data_ptr(),
                item.dst.stride(),
                item.dst.element_size(),
            ):
                rows, counts = move_descriptors(
                    matrix, item.src_dtype, item.dst.dtype, (COPY_ROWS, COPY_COLUMNS), index
                )
                descriptors += rows
                tiles += counts
        # Nearly every table has WORDS; adding it to all leaves fewer kernels to compile.
        self.forms = functools.reduce(operator.or_, (row[0] | WORDS.value for row in descriptors), 0)
        if descriptors:
            table = torch.tensor(descriptors, dtype=torch.int64, device=self.device)
            self.owner, table[:, FIRST_TILE.value] = tile_index(tiles, self.device)
            self.table = table

    def copy(self, flat: Tensor) -> None:
        self._run(flat, None)
        for index in self.in_torch:
            item = self.items[index]
            item.dst.detach().copy_(source_view(item, flat))

    def count_differences(self, flat: Tensor) -> Tensor:
        counts = torch.zeros(len(self.items), dtype=torch.int64, device=self.device)
        self._run(flat, counts)
        for index in self.in_torch:
            counts[index] = differing_bytes(self.items[index], flat)
        return counts

    def _run(self, flat: Tensor, counts: Tensor | None) -> None:
        if not self.forms:
            return
        if flat.data_ptr() % VECTOR_BYTES:
            raise ValueError(f"the bucket's address is not a multiple of {VECTOR_BYTES}")
        with on_device(self.device):
            _copy_kernel[(len(self.owner),)](
                flat,
                self.owner,
                self.table,
                counts,
                FORMS=self.forms,
                TILE_ROWS=COPY_ROWS,
                TILE_COLUMNS=COPY_COLUMNS,
                COMPARE=counts is not None,
                num_warps=COPY_WARPS,
            )
