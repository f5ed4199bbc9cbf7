"""The launch of ``cast_table``: blocks of FP8, casts and copies of a whole bucket by one kernel.

A program works at one tile.  For FP8 a tile is one block of the scales: read once, its largest magnitude found,
divided and written.  The bytes are those of ``quantize.block_fp8``:

* the division by the scale is the exact fp32 quotient.  ``div_rn`` of every element would cost more than reading
  it; the block has one divisor, so its correctly rounded reciprocal is computed once, and corrections with fused
  multiply-adds give the correctly rounded quotient: one for dividends of bf16, as all 2**23 x 128 pairs of
  significands show, two for any (Markstein, "Computation of elementary functions on the IBM RISC System/6000
  processor", 1990);
* Hopper rounds to e4m3 as torch does, to nearest even.  Before Hopper, and in Triton's interpreter, ``div_rn`` and
  integer arithmetic take the place of both.

Rows of bf16 in whole vectors, which is nearly every byte of a push, have a path of their own that handles pairs of
elements as words: fewer registers, so more tiles in flight, and fewer instructions.

A NaN or an infinity in a block gives NaN, with whatever sign; everything finite is equal to the bit.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from slime.weights.kernels.cast_table import CastItem, run_in_torch
from slime.weights.kernels.rectangles import VECTOR_BYTES, Matrix, is_aligned, matrices, tile_index
from slime.weights.kernels.triton_tiles import (
    FIELDS,
    FIRST_TILE,
    MOVES,
    NUM_MOVES,
    WORDS,
    form_of,
    load_descriptor,
    move_descriptors,
    move_tile,
    on_device,
)
from slime.weights.quantize.block_fp8 import FP8_MAX, MIN_ABSMAX, num_blocks

# Forms of FP8 blocks, beside those that move elements; WHOLE: rows of whole vectors.
FROM_BF16, FROM_BF16_WHOLE = tl.constexpr(1 << NUM_MOVES), tl.constexpr(2 << NUM_MOVES)
FROM_FP16, FROM_FP16_WHOLE = tl.constexpr(4 << NUM_MOVES), tl.constexpr(8 << NUM_MOVES)
FROM_FP32, FROM_FP32_WHOLE = tl.constexpr(16 << NUM_MOVES), tl.constexpr(32 << NUM_MOVES)
FP8_FROM = {
    torch.bfloat16: (FROM_BF16, FROM_BF16_WHOLE),
    torch.float16: (FROM_FP16, FROM_FP16_WHOLE),
    torch.float32: (FROM_FP32, FROM_FP32_WHOLE),
}
ONE_RUN = 1 << 30
"""Rows of a run that never ends; a multiple of every block."""

MAX = tl.constexpr(FP8_MAX)
FLOOR = tl.constexpr(MIN_ABSMAX)
VECTOR = tl.constexpr(VECTOR_BYTES)


@dataclass(frozen=True, slots=True)
class CastShape:
    """How the work is cut up; the defaults were the fastest on an H100."""

    rows: int = 8
    columns: int = 512
    """Of a tile that is copied or cast, in four-byte words or elements."""
    num_warps: int = 8
    programs_per_sm: int = 0
    """Programs that each walk over many tiles; 0 for one program a tile."""
    max_registers: int | None = 64
    """Of a thread, so that four programs fit a multiprocessor; None leaves it to the compiler."""


@triton.jit
def _round_to_e4m3(value):
    """The e4m3 byte of fp32 values of magnitude 448 or a rounding error more, in integer arithmetic."""
    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # 20 of 23 bits of the mantissa go, to nearest even; the exponent's bias falls from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 the spacing is 2**-9, which is that of fp32 from 2**14 on: the addition rounds.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, tl.minimum(normal, 0x7E))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def _reciprocal_of(scale):
    """Correctly rounded 1 / scale, and the scale of the corrections."""
    # Against an infinite scale the remainder would be NaN; the quotient of a finite number is zero.
    return tl.div_rn(1.0, scale), tl.where(scale == float("inf"), 0.0, scale)


@triton.jit
def _corrected(quotient, x, reciprocal, scale):
    """The quotient with its remainder divided too.

    The remainder is taken with the opposite sign: so a quotient of -0.0 stays what it is, and -x costs nothing.
    """
    return tl.fma(tl.fma(quotient, scale, x * -1.0), reciprocal * -1.0, quotient)


@triton.jit
def _quotient_in_e4m3(x, scale, ON_HOPPER: tl.constexpr):
    """e4m3 bytes of fp32 ``x`` divided by one fp32 number."""
    if ON_HOPPER:
        reciprocal, divisor = _reciprocal_of(scale)
        quotient = _corrected(x * reciprocal, x, reciprocal, divisor)
        quotient = _corrected(quotient, x, reciprocal, divisor)
        # The instruction saturates, so that 448 and a rounding error is 448.
        code = quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = _round_to_e4m3(tl.div_rn(x, tl.zeros_like(x) + scale))
    return code


@triton.jit
def _scale_of(absmax, is_ue8m0):
    """The scale of a block with this largest magnitude."""
    scale = tl.div_rn(tl.maximum(absmax, FLOOR, propagate_nan=tl.PropagateNan.ALL), MAX)
    bits = scale.to(tl.int32, bitcast=True)
    # A mantissa that is not zero carries into the exponent; NaN and infinity stay.
    rounded = ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where((is_ue8m0 != 0) & (bits < 0x7F800000), rounded, scale)


@triton.jit
def _source_rows(first, run, run_stride, BLOCK_ROWS: tl.constexpr):
    """Rows of the source behind those of a block: the first, and the distance of each from it."""
    offset = tl.arange(0, BLOCK_ROWS)
    first_source = first // run * run_stride + first % run
    if run % BLOCK_ROWS != 0:
        # The block lies in several runs.
        offset = (first + offset) // run * run_stride + (first + offset) % run - first_source
    return first_source, offset


@triton.jit
def _quantize(
    descriptor, tile, out, TYPE: tl.constexpr, SIZE: tl.constexpr, IS_WHOLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ON_HOPPER: tl.constexpr,
):  # fmt: skip
    """One block: TYPE and SIZE in bytes of the source's elements; IS_WHOLE when lengths are in vectors."""
    _, _, across, rows, columns, src, stride, run, dst, run_stride, scales, is_ue8m0 = descriptor
    first = tile // across * BLOCK_ROWS
    first_source, source_row = _source_rows(first, run.to(tl.int32), run_stride.to(tl.int32), BLOCK_ROWS)
    row = tl.arange(0, BLOCK_ROWS)
    column = (tile % across * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS))[None, :]
    source = src.to(tl.pointer_type(TYPE))
    quantized = out + dst
    if IS_WHOLE:
        source = tl.multiple_of(source, VECTOR)
        quantized = tl.multiple_of(quantized, VECTOR)
        columns *= VECTOR
        stride *= VECTOR // SIZE
    # A whole matrix may have more elements than 2**31, a block's rows have not.
    source += first_source.to(tl.int64) * stride
    quantized += first.to(tl.int64) * columns
    mask = (first + row < rows)[:, None] & (column < columns)
    x = tl.load(source + (source_row * stride.to(tl.int32))[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    # As integers the bits have the order of the magnitudes, NaN above all.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    scale = _scale_of(largest.to(tl.float32, bitcast=True), is_ue8m0)
    tl.store((out + scales).to(tl.pointer_type(tl.float32), bitcast=True) + tile, scale)
    tl.store(quantized + (row * columns)[:, None] + column, _quotient_in_e4m3(x, scale, ON_HOPPER), mask=mask)


@triton.jit
def _larger_halves(a, b):
    """Maxima of both unsigned halves of two words."""
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _quantize_pairs(descriptor, tile, out, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """One block of bf16 in whole vectors, on Hopper: two elements a word, until each is divided."""
    _, _, across, rows, columns, src, stride, run, dst, run_stride, scales, is_ue8m0 = descriptor
    first = tile // across * BLOCK_ROWS
    first_source, source_row = _source_rows(first, run.to(tl.int32), run_stride.to(tl.int32), BLOCK_ROWS)
    row = tl.arange(0, BLOCK_ROWS)
    column = (tile % across * (BLOCK_COLUMNS // 2) + tl.arange(0, BLOCK_COLUMNS // 2))[None, :]
    columns *= VECTOR // 2
    stride *= VECTOR // 4
    source = tl.multiple_of(src.to(tl.pointer_type(tl.int32)), VECTOR) + first_source.to(tl.int64) * stride
    quantized = tl.multiple_of((out + dst).to(tl.pointer_type(tl.int16), bitcast=True), VECTOR)
    quantized += first.to(tl.int64) * columns
    mask = (first + row < rows)[:, None] & (column < columns)
    pair = tl.load(source + (source_row * stride.to(tl.int32))[:, None] + column, mask=mask, other=0)
    magnitudes = tl.reshape(pair & 0x7FFF7FFF, (BLOCK_ROWS * (BLOCK_COLUMNS // 2),))
    largest = tl.reduce(magnitudes, 0, _larger_halves)
    largest = tl.maximum(largest >> 16, largest & 0xFFFF) << 16
    scale = _scale_of(largest.to(tl.float32, bitcast=True), is_ue8m0)
    tl.store((out + scales).to(tl.pointer_type(tl.float32), bitcast=True) + tile, scale)
    reciprocal, divisor = _reciprocal_of(scale)
    even = (pair << 16).to(tl.float32, bitcast=True)
    odd = (pair & -65536).to(tl.float32, bitcast=True)
    even = _corrected(even * reciprocal, even, reciprocal, divisor)
    odd = _corrected(odd * reciprocal, odd, reciprocal, divisor)
    code = tl.inline_asm_elementwise(
        "cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;", "=h,f,f", [odd, even], dtype=tl.int16, is_pure=True, pack=1
    )
    tl.store(quantized + (row * columns)[:, None] + column, code, mask=mask)


@triton.jit
def _cast_tile(  # noqa: C901 - one branch for each form
    out, owner, table, program, FORMS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ON_HOPPER: tl.constexpr,
):  # fmt: skip
    """Forms that the table lacks are not compiled."""
    descriptor = load_descriptor(table + tl.load(owner + program).to(tl.int64) * FIELDS)
    form = descriptor[0]
    tile = program - descriptor[1]
    if FROM_BF16_WHOLE & FORMS:
        if form == FROM_BF16_WHOLE:
            if ON_HOPPER:
                _quantize_pairs(descriptor, tile, out, BLOCK_ROWS, BLOCK_COLUMNS)
            else:
                _quantize(descriptor, tile, out, tl.bfloat16, 2, True, BLOCK_ROWS, BLOCK_COLUMNS, False)
    if FROM_BF16 & FORMS:
        if form == FROM_BF16:
            _quantize(descriptor, tile, out, tl.bfloat16, 2, False, BLOCK_ROWS, BLOCK_COLUMNS, ON_HOPPER)
    if FROM_FP16_WHOLE & FORMS:
        if form == FROM_FP16_WHOLE:
            _quantize(descriptor, tile, out, tl.float16, 2, True, BLOCK_ROWS, BLOCK_COLUMNS, ON_HOPPER)
    if FROM_FP16 & FORMS:
        if form == FROM_FP16:
            _quantize(descriptor, tile, out, tl.float16, 2, False, BLOCK_ROWS, BLOCK_COLUMNS, ON_HOPPER)
    if FROM_FP32_WHOLE & FORMS:
        if form == FROM_FP32_WHOLE:
            _quantize(descriptor, tile, out, tl.float32, 4, True, BLOCK_ROWS, BLOCK_COLUMNS, ON_HOPPER)
    if FROM_FP32 & FORMS:
        if form == FROM_FP32:
            _quantize(descriptor, tile, out, tl.float32, 4, False, BLOCK_ROWS, BLOCK_COLUMNS, ON_HOPPER)
    if MOVES & FORMS:
        if form <= MOVES:
            src = descriptor[5].to(tl.pointer_type(tl.uint8))
            move_tile(descriptor, tile, src, out + descriptor[8], FORMS, TILE_ROWS, TILE_COLUMNS, False)


@triton.jit(do_not_specialize=["num_tiles"])
def _cast_kernel(
    out, owner, table, num_tiles, FORMS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ON_HOPPER: tl.constexpr, WALKS: tl.constexpr,
):  # fmt: skip
    """A program takes one tile, or with WALKS every n-th one of n programs."""
    program = tl.program_id(0)
    if WALKS:
        for tile in range(program, num_tiles, tl.num_programs(0)):
            _cast_tile(
                out, owner, table, tile, FORMS, TILE_ROWS, TILE_COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS, ON_HOPPER
            )  # fmt: skip
    else:
        _cast_tile(out, owner, table, program, FORMS, TILE_ROWS, TILE_COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS, ON_HOPPER)


class CastLaunch:
    """The table of one list of items, on their device or on one that can read them."""

    def __init__(
        self,
        items: Sequence[CastItem],
        out_dtype: torch.dtype,
        block: tuple[int, int],
        shape: CastShape | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.shape = shape or CastShape()
        self.out_dtype = out_dtype
        self.block = block
        self.device = device or items[0].source.device
        self.in_torch: list[CastItem] = []
        """Items that no kernel covers: a rare dtype, or a block whose sides are no powers of two."""
        descriptors: list[list[int]] = []
        tiles: list[int] = []
        for item in items:
            rows, counts = self._quantized(item) if item.is_fp8 else self._moved(item)
            descriptors += rows
            tiles += counts
        self.forms = _few_masks(functools.reduce(operator.or_, (row[0] for row in descriptors), 0))
        self.num_tiles = sum(tiles)
        if descriptors:
            table = torch.tensor(descriptors, dtype=torch.int64, device=self.device)
            self.owner, table[:, FIRST_TILE.value] = tile_index(tiles, self.device)
            self.table = table
        is_cuda = self.device.type == "cuda"
        self.on_hopper = is_cuda and torch.cuda.get_device_capability(self.device) >= (9, 0)
        self.num_programs = self.num_tiles
        if is_cuda and self.shape.programs_per_sm:
            processors = torch.cuda.get_device_properties(self.device).multi_processor_count
            self.num_programs = min(self.num_tiles, processors * self.shape.programs_per_sm)

    def run(self, out: Tensor) -> None:
        if out.data_ptr() % VECTOR_BYTES:
            raise ValueError(f"the bucket starts at an address that is no multiple of {VECTOR_BYTES}")
        if self.num_tiles:
            with on_device(self.device):
                _cast_kernel[(self.num_programs,)](
                    out,
                    self.owner,
                    self.table,
                    self.num_tiles,
                    FORMS=self.forms,
                    TILE_ROWS=self.shape.rows,
                    TILE_COLUMNS=self.shape.columns,
                    BLOCK_ROWS=self.block[0],
                    BLOCK_COLUMNS=self.block[1],
                    ON_HOPPER=self.on_hopper,
                    WALKS=self.num_programs < self.num_tiles,
                    num_warps=self.shape.num_warps,
                    maxnreg=self.shape.max_registers,
                )
        for item in self.in_torch:
            run_in_torch(item, out, self.out_dtype, self.block)

    def _quantized(self, item: CastItem) -> tuple[list[list[int]], list[int]]:
        forms = FP8_FROM.get(item.source.dtype)
        size = item.source.element_size()
        stride = item.source.stride(0) if item.source.size(0) > 1 else 0
        is_plain = item.row_run >= item.rows
        run, run_stride = (ONE_RUN, 0) if is_plain else (item.row_run, item.run_stride)
        # In a block the kernel counts elements of the source with 32 bits.
        crossings = 0 if run % self.block[0] == 0 else self.block[0] // run + 1
        span = stride * (self.block[0] + crossings * run_stride)
        if forms is None or any(side & (side - 1) for side in self.block) or span >= 1 << 31:
            self.in_torch.append(item)
            return [], []
        assert item.scale_offset is not None  # checked by the table
        address = item.source.data_ptr()
        columns = item.columns
        # One byte an element is written, so rows of whole vectors are whole vectors at both sides.
        is_whole = is_aligned(address, stride * size, item.out_offset, columns)
        if is_whole:
            columns, stride = columns // VECTOR_BYTES, stride * size // VECTOR_BYTES
        down, across = num_blocks(item.rows, item.columns, self.block)
        # Fields by the names of triton_tiles; those of strides of columns and of the target's rows hold other things.
        fields = [
            forms[is_whole].value,
            0,
            across,
            item.rows,
            columns,
            address,
            stride,
            run,
            item.out_offset,
            run_stride,
        ]
        return [[*fields, item.scale_offset, int(item.kind == "fp8_block_ue8m0")]], [down * across]

    def _moved(self, item: CastItem) -> tuple[list[list[int]], list[int]]:
        from_dtype = item.source.dtype
        to_dtype = from_dtype if item.kind == "copy" else self.out_dtype
        if form_of(from_dtype, to_dtype) is None:
            self.in_torch.append(item)
            return [], []
        descriptors: list[list[int]] = []
        tiles: list[int] = []
        for matrix in _rectangles(item, to_dtype):
            rows, counts = move_descriptors(matrix, from_dtype, to_dtype, (self.shape.rows, self.shape.columns), 0)
            descriptors += rows
            tiles += counts
        return descriptors, tiles


def _few_masks(forms: int) -> int:
    """The forms that a kernel is compiled for: the usual ones too, so that most tables share one of two kernels."""
    if not forms:
        return 0
    return forms | WORDS.value | (0 if forms <= MOVES.value else FROM_BF16_WHOLE.value)


def _rectangles(item: CastItem, to_dtype: torch.dtype) -> list[Matrix]:
    """Whole runs, and the run that is cut off at the end."""
    stride, columns = item.source.stride(0), item.columns
    run = min(item.row_run, item.rows)
    num_whole, rest = divmod(item.rows, run)
    size, to_size = item.source.element_size(), to_dtype.itemsize
    found: list[Matrix] = []
    for first, shape in ((0, (num_whole, run, columns)), (num_whole, (1, rest, columns))):
        source = item.source.data_ptr() + first * item.run_stride * stride * size
        target = item.out_offset + first * run * columns * to_size
        source_strides = (item.run_stride * stride, stride, 1)
        found += matrices(shape, source, source_strides, size, target, (run * columns, columns, 1), to_size)
    return found
