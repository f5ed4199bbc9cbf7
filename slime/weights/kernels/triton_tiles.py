"""One tile of a matrix copied, cast or compared: the part that the Triton kernels of the tables share.

A *form* says how the elements of a descriptor are read and written.  Kernels are compiled for the forms that a table
has, as a bit mask; what a table does not need costs no registers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

from slime.weights.kernels.rectangles import VECTOR_WORDS, Matrix, as_lines, in_words

# Descriptors are rows of int64.  These fields are the same in every table.
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
FIELDS = tl.constexpr(12)

# Forms are bits, so that those of a table make a mask.
WORDS = tl.constexpr(1 << 0)
"""Bytes as they are, in whole vectors; lengths and row strides in vectors, columns contiguous."""
SIZE_1, SIZE_2 = tl.constexpr(1 << 1), tl.constexpr(1 << 2)
"""Elements as they are, by their size in bytes."""
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
def _tile_pointers(
    table, row, column, base_src, base_dst, FROM: tl.constexpr, TO: tl.constexpr, SCALE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Pointers to a tile's elements at both sides, and which of them exist."""
    src = base_src.to(tl.pointer_type(FROM), bitcast=True)
    dst = base_dst.to(tl.pointer_type(TO), bitcast=True)
    src = tl.multiple_of(src, ALIGNMENT)
    dst = tl.multiple_of(dst, ALIGNMENT)
    rows = tl.load(table + ROWS)
    columns = tl.load(table + COLUMNS) * SCALE
    src_row = tl.load(table + SRC_ROW) * SCALE
    dst_row = tl.load(table + DST_ROW) * SCALE
    if SCALE > 1:
        src += row[:, None] * src_row + column[None, :]
        dst += row[:, None] * dst_row + column[None, :]
    else:
        src += row[:, None] * src_row + column[None, :] * tl.load(table + SRC_COLUMN)
        dst += row[:, None] * dst_row + column[None, :] * tl.load(table + DST_COLUMN)
    return src, dst, (row < rows)[:, None] & (column < columns)[None, :]


@triton.jit
def _bytes_that_differ(a, b, SIZE: tl.constexpr):
    """Number of bytes in which two tiles of integers of SIZE bytes differ."""
    difference = a ^ b
    count = tl.sum((difference != 0).to(tl.int32))
    if count > 0:
        total = tl.zeros(difference.shape, tl.int32)
        for index in tl.static_range(SIZE):
            total += (((difference >> (8 * index)) & 255) != 0).to(tl.int32)
        count = tl.sum(total)
    return count


@triton.jit
def _move(
    table, row, column, base_src, base_dst, FROM: tl.constexpr, TO: tl.constexpr, BITS: tl.constexpr,
    SIZE: tl.constexpr, SCALE: tl.constexpr, ALIGNMENT: tl.constexpr, COMPARE: tl.constexpr,
):  # fmt: skip
    """FROM and TO: how elements are read and written; BITS: the integer of TO's SIZE bytes."""
    src, dst, mask = _tile_pointers(table, row, column, base_src, base_dst, FROM, TO, SCALE, ALIGNMENT)
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
def _move_if(
    FORM_HERE: tl.constexpr, FORMS: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr, BITS: tl.constexpr,
    SIZE: tl.constexpr, SCALE: tl.constexpr, ALIGNMENT: tl.constexpr, COMPARE: tl.constexpr,
    form, table, row, column, base_src, base_dst,
):  # fmt: skip
    """The move in one form: compiled when the table has it, done when the descriptor is of it."""
    count = tl.full((), 0, tl.int32)
    if FORM_HERE & FORMS:
        if form == FORM_HERE:
            count = _move(
                table, row, column, base_src, base_dst, FROM, TO, BITS, SIZE, SCALE, ALIGNMENT, COMPARE
            )  # fmt: skip
    return count


@triton.jit
def move_tile(
    table, tile, base_src, base_dst, FORMS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    COMPARE: tl.constexpr,
):  # fmt: skip
    """Copy or cast one tile of a descriptor; with COMPARE only count the bytes that would change.

    Args:
        table: the descriptor.
        tile: number of the tile in the descriptor.
        base_src, base_dst: pointers to bytes, of element (0, 0).
        FORMS: bit mask of the forms that occur.

    Returns:
        Bytes that differ; 0 without COMPARE.
    """
    form = tl.load(table + FORM)
    across = tl.load(table + TILES_PER_ROW).to(tl.int32)
    # Rows times strides may pass 2**31.
    row = (tile // across).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = (tile % across) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    count = tl.full((), 0, tl.int32)
    # Form; dtypes read and written, the integer of the latter and its bytes; words in a vector, alignment.
    count += _move_if(
        WORDS, FORMS, tl.int32, tl.int32, tl.int32, 4, UNIT, 16, COMPARE, form, table, row, column, base_src, base_dst
    )  # noqa: E501
    count += _move_if(
        SIZE_1, FORMS, tl.int8, tl.int8, tl.int8, 1, 1, 1, COMPARE, form, table, row, column, base_src, base_dst
    )  # noqa: E501
    count += _move_if(
        SIZE_2, FORMS, tl.int16, tl.int16, tl.int16, 2, 1, 1, COMPARE, form, table, row, column, base_src, base_dst
    )  # noqa: E501
    count += _move_if(
        SIZE_4, FORMS, tl.int32, tl.int32, tl.int32, 4, 1, 1, COMPARE, form, table, row, column, base_src, base_dst
    )  # noqa: E501
    count += _move_if(
        SIZE_8, FORMS, tl.int64, tl.int64, tl.int64, 8, 1, 1, COMPARE, form, table, row, column, base_src, base_dst
    )  # noqa: E501
    count += _move_if(
        BF16_TO_FP16,
        FORMS,
        tl.bfloat16,
        tl.float16,
        tl.int16,
        2,
        1,
        1,
        COMPARE,
        form,
        table,
        row,
        column,
        base_src,
        base_dst,
    )  # noqa: E501
    count += _move_if(
        BF16_TO_FP32,
        FORMS,
        tl.bfloat16,
        tl.float32,
        tl.int32,
        4,
        1,
        1,
        COMPARE,
        form,
        table,
        row,
        column,
        base_src,
        base_dst,
    )  # noqa: E501
    count += _move_if(
        FP16_TO_BF16,
        FORMS,
        tl.float16,
        tl.bfloat16,
        tl.int16,
        2,
        1,
        1,
        COMPARE,
        form,
        table,
        row,
        column,
        base_src,
        base_dst,
    )  # noqa: E501
    count += _move_if(
        FP16_TO_FP32,
        FORMS,
        tl.float16,
        tl.float32,
        tl.int32,
        4,
        1,
        1,
        COMPARE,
        form,
        table,
        row,
        column,
        base_src,
        base_dst,
    )  # noqa: E501
    count += _move_if(
        FP32_TO_BF16,
        FORMS,
        tl.float32,
        tl.bfloat16,
        tl.int16,
        2,
        1,
        1,
        COMPARE,
        form,
        table,
        row,
        column,
        base_src,
        base_dst,
    )  # noqa: E501
    count += _move_if(
        FP32_TO_FP16,
        FORMS,
        tl.float32,
        tl.float16,
        tl.int16,
        2,
        1,
        1,
        COMPARE,
        form,
        table,
        row,
        column,
        base_src,
        base_dst,
    )  # noqa: E501
    return count


def form_of(src_dtype: torch.dtype, dst_dtype: torch.dtype) -> int | None:
    """The form that moves single elements; None for a cast that no kernel has."""
    same = src_dtype == dst_dtype
    form = SAME.get(src_dtype.itemsize) if same else CASTS.get((src_dtype, dst_dtype))
    return None if form is None else form.value


def move_descriptors(
    matrix: Matrix, src_dtype: torch.dtype, dst_dtype: torch.dtype, tile: tuple[int, int], last: int
) -> tuple[list[list[int]], list[int]]:
    """Descriptors of one matrix, in the widest form that fits, and the number of their tiles.

    Args:
        matrix: of elements of the two dtypes, which have a form.
        tile: rows and columns of a tile, in words or elements.
        last: what the field LAST holds.
    """
    words = in_words(matrix, src_dtype.itemsize) if src_dtype == dst_dtype else None
    parts = words or as_lines(matrix, src_dtype.itemsize, dst_dtype.itemsize)
    scale, form = (VECTOR_WORDS, WORDS.value) if words else (1, form_of(src_dtype, dst_dtype))
    assert form is not None  # the caller has asked
    descriptors, counts = [], []
    for part in parts:
        across = -(-part.columns // tile[1])
        counts.append(-(-part.rows // tile[0]) * across)
        descriptors.append(
            [form, 0, across, part.rows, part.columns // scale]
            + [part.src, part.src_strides[0] // scale, part.src_strides[1]]
            + [part.dst, part.dst_strides[0] // scale, part.dst_strides[1], last]
        )
    return descriptors, counts


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Where kernels are launched; Triton's interpreter, which tests use, takes CPU tensors and has no device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
