"""The Triton kernel of ``CastTable``: FP8 quantization, casts and copies of a whole bucket in one launch.

Each program processes one tile: one FP8 block, or a piece of a matrix that is copied or cast (``triton_copy``).  With
digests, tiles of the two usual forms are digested while they are in registers, which avoids reading them again;
another launch digests the few segments of other forms.

An FP8 block is read once; the program finds its largest magnitude, divides by the scale and writes the result.  The
bytes equal those of ``quantize.block_fp8``:

* The division by the scale gives the correctly rounded fp32 quotient.  ``div_rn`` of every element would cost more
  than reading it.  A block has one divisor, so its correctly rounded reciprocal is computed once, and fused
  multiply-adds correct the product: one correction suffices for bf16 dividends, as checked for all 2**23 x 128 pairs
  of significands, and two for any dividend (Markstein, "Computation of elementary functions on the IBM RISC
  System/6000 processor", 1990).
* Hopper rounds to e4m3 as torch does, to nearest even.  Before Hopper, and in Triton's interpreter, ``div_rn`` and
  integer arithmetic replace both steps.

Vector-aligned bf16 rows, nearly every byte of a push, have a path that handles pairs of elements as words: it needs
fewer registers, so more tiles are in flight, and fewer instructions.

A block with a NaN or an infinity gives NaN, of either sign; finite blocks are bitwise equal.
"""

from __future__ import annotations

import bisect
import functools
import operator
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from slime.ext.fast_push.kernels.copy_2d import VECTOR_BYTES, Copy2D, is_aligned, matrices, tile_index
from slime.ext.fast_push.kernels.tables import CastItem, run_in_torch
from slime.ext.fast_push.kernels.triton_copy import (
    DST,
    FIELDS,
    FIRST_TILE,
    FORM,
    LAST,
    MOVES,
    NUM_MOVES,
    POSITION,
    UNIT,
    WORDS,
    form_of,
    load_descriptor,
    move_descriptors,
    move_tile,
    on_device,
)
from slime.ext.fast_push.kernels.triton_digest import DigestLaunch, add_digest
from slime.weights.digest import WORD_BYTES as DIGEST_BYTES
from slime.weights.quantize.block_fp8 import FP8_MAX, MIN_ABSMAX, num_blocks

# Forms of FP8 blocks, in addition to the forms that move elements.  WHOLE: vector-aligned rows.
FROM_BF16, FROM_BF16_WHOLE = tl.constexpr(1 << NUM_MOVES), tl.constexpr(2 << NUM_MOVES)
FROM_FP16, FROM_FP16_WHOLE = tl.constexpr(4 << NUM_MOVES), tl.constexpr(8 << NUM_MOVES)
FROM_FP32, FROM_FP32_WHOLE = tl.constexpr(16 << NUM_MOVES), tl.constexpr(32 << NUM_MOVES)
FP8_FROM = {
    torch.bfloat16: (FROM_BF16, FROM_BF16_WHOLE),
    torch.float16: (FROM_FP16, FROM_FP16_WHOLE),
    torch.float32: (FROM_FP32, FROM_FP32_WHOLE),
}
ONE_RUN = 1 << 30
"""``row_run`` for consecutive rows: larger than any matrix, and a multiple of every block."""
VECTOR = tl.constexpr(VECTOR_BYTES)
MAX = tl.constexpr(FP8_MAX)
FLOOR = tl.constexpr(MIN_ABSMAX)
CAST_ROWS, CAST_COLUMNS, CAST_WARPS = 8, 512, 8
"""Tile of a copy or cast, in four-byte words or elements, and warps of a program: the fastest on an H100."""
MAX_REGISTERS = 64
"""Registers per thread; with 64, four programs fit on a multiprocessor."""


@triton.jit
def _round_to_e4m3(value):
    """Round fp32 values to e4m3 bytes in integer arithmetic.  Magnitudes may exceed 448 by a rounding error only."""
    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Drop 20 of the 23 mantissa bits, rounding to nearest even; the exponent's bias goes from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6, e4m3 values are 2**-9 apart, as are fp32 values from 2**14 on, so adding 2**14 rounds.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, tl.minimum(normal, 0x7E))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def _reciprocal_of(scale):
    """Return 1 / scale, correctly rounded, and the divisor for ``_corrected``."""
    # With an infinite scale the remainder would be NaN; divisor 0 keeps the quotient of a finite number, zero.
    return tl.div_rn(1.0, scale), tl.where(scale == float("inf"), 0.0, scale)


@triton.jit
def _corrected(quotient, x, reciprocal, scale):
    """Return the quotient plus its remainder times the reciprocal.

    Both factors are negated: this keeps a quotient of -0.0, and the negations are free.
    """
    return tl.fma(tl.fma(quotient, scale, x * -1.0), reciprocal * -1.0, quotient)


@triton.jit
def _quotient_in_e4m3(x, scale, ON_HOPPER: tl.constexpr):
    """Return ``x / scale`` as e4m3 bytes; ``x`` is an fp32 tile, ``scale`` an fp32 scalar."""
    if ON_HOPPER:
        reciprocal, divisor = _reciprocal_of(scale)
        quotient = _corrected(x * reciprocal, x, reciprocal, divisor)
        quotient = _corrected(quotient, x, reciprocal, divisor)
        # The instruction saturates, so 448 plus a rounding error gives 448.
        code = quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = _round_to_e4m3(tl.div_rn(x, tl.zeros_like(x) + scale))
    return code


@triton.jit
def _scale_of(absmax, is_ue8m0):
    scale = tl.div_rn(tl.maximum(absmax, FLOOR, propagate_nan=tl.PropagateNan.ALL), MAX)
    bits = scale.to(tl.int32, bitcast=True)
    # Round up to a power of two: a non-zero mantissa carries into the exponent.  NaN and infinity stay.
    rounded = ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where((is_ue8m0 != 0) & (bits < 0x7F800000), rounded, scale)


@triton.jit
def _source_rows(first, run, run_stride, BLOCK_ROWS: tl.constexpr):
    """Return the source row of a block's first row, and the offset of every row's source from it."""
    offset = tl.arange(0, BLOCK_ROWS)
    first_source = first // run * run_stride + first % run
    if run % BLOCK_ROWS != 0:
        # The block spans several runs.
        offset = (first + offset) // run * run_stride + (first + offset) % run - first_source
    return first_source, offset


@triton.jit
def quantize_block_of(
    descriptor, tile, out, TYPE: tl.constexpr, SIZE: tl.constexpr, IS_WHOLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ON_HOPPER: tl.constexpr,
):  # fmt: skip
    """Quantize one block.

    TYPE and SIZE are the dtype of the source and its bytes per element.  With IS_WHOLE, columns and strides of the
    descriptor count vectors.

    Three fields of the descriptor have other meanings here: SRC_COLUMN is ``row_run``, DST_ROW is ``run_stride``, and
    DST_COLUMN is the offset of the scales.  LAST is twice the segment of the digest, plus one for power-of-two scales;
    POSITION is the index of the first word within the segment.
    """
    _, _, across, rows, columns, src, stride, run, dst, run_stride, scales, last, _ = descriptor
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
    # A matrix may have more than 2**31 elements; the rows of a block have fewer.
    source += first_source.to(tl.int64) * stride
    quantized += first.to(tl.int64) * columns
    mask = (first + row < rows)[:, None] & (column < columns)
    x = tl.load(source + (source_row * stride.to(tl.int32))[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    # Without the sign, fp32 bits compared as integers order by magnitude, with NaN largest.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    scale = _scale_of(largest.to(tl.float32, bitcast=True), last & 1)
    tl.store((out + scales).to(tl.pointer_type(tl.float32), bitcast=True) + tile, scale)
    tl.store(quantized + (row * columns)[:, None] + column, _quotient_in_e4m3(x, scale, ON_HOPPER), mask=mask)


@triton.jit
def _larger_halves(a, b):
    """Return the maximum of the two words' unsigned 16-bit halves, for each half."""
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def quantize_pairs(
    descriptor, tile, out, sums, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, DIGEST: tl.constexpr
):
    """Quantize one vector-aligned bf16 block on Hopper, as words of two elements up to the division.

    With DIGEST, also add the written bytes to the segment's digest.
    """
    _, _, across, rows, columns, src, stride, run, dst, run_stride, scales, last, position = descriptor
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
    scale = _scale_of(largest.to(tl.float32, bitcast=True), last & 1)
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
    if DIGEST:
        half = code.to(tl.uint16, bitcast=True).to(tl.uint64)
        low, high = tl.split(tl.reshape(half, (BLOCK_ROWS, BLOCK_COLUMNS // 4, 2)))
        low, high = tl.split(tl.reshape(low | (high << 16), (BLOCK_ROWS, BLOCK_COLUMNS // 8, 2)))
        word_column = (tile % across * (BLOCK_COLUMNS // 8) + tl.arange(0, BLOCK_COLUMNS // 8))[None, :]
        in_row = columns // 4
        position += (first + row).to(tl.int64)[:, None] * in_row + word_column
        exists = (first + row < rows)[:, None] & (word_column < in_row)
        add_digest(sums, last >> 1, low | (high << 32), position.to(tl.uint64), exists)


@triton.jit
def _copy_words(
    descriptor, tile, out, sums, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy one tile of the form WORDS and digest it.  LAST is the segment; POSITION is the index within it of the
    descriptor's first 64-bit word."""
    _, _, across, rows, columns, src, src_row, _, dst, dst_row, _, segment, position = descriptor
    row = ((tile // across).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS))[:, None]
    column = (tile % across * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS))[None, :]
    source = tl.multiple_of(src.to(tl.pointer_type(tl.uint32)), VECTOR)
    target = tl.multiple_of((out + dst).to(tl.pointer_type(tl.uint32), bitcast=True), VECTOR)
    mask = (row < rows) & (column < columns * UNIT)
    word = tl.load(source + row * (src_row * UNIT) + column, mask=mask, other=0)
    tl.store(target + row * (dst_row * UNIT) + column, word, mask=mask)
    low, high = tl.split(tl.reshape(word.to(tl.uint64), (TILE_ROWS, TILE_COLUMNS // 2, 2)))
    pair = (tile % across * (TILE_COLUMNS // 2) + tl.arange(0, TILE_COLUMNS // 2))[None, :]
    exists = (row < rows) & (pair < columns * (UNIT // 2))
    position = (position + row * (dst_row * (UNIT // 2)) + pair).to(tl.uint64)
    add_digest(sums, segment, low | (high << 32), position, exists)


@triton.jit
def _cast_kernel(  # noqa: C901 - one branch for each form
    out, owner, table, sums, FORMS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ON_HOPPER: tl.constexpr, DIGEST: tl.constexpr,
):  # fmt: skip
    """Cast one tile per program.  Only the table's FORMS are compiled."""
    program = tl.program_id(0)
    descriptor = load_descriptor(table + tl.load(owner + program).to(tl.int64) * FIELDS)
    form = descriptor[0]
    tile = program - descriptor[1]
    if FROM_BF16_WHOLE & FORMS:
        if form == FROM_BF16_WHOLE:
            if ON_HOPPER:
                quantize_pairs(descriptor, tile, out, sums, BLOCK_ROWS, BLOCK_COLUMNS, DIGEST)
            else:
                quantize_block_of(descriptor, tile, out, tl.bfloat16, 2, True, BLOCK_ROWS, BLOCK_COLUMNS, False)
    if FROM_BF16 & FORMS:
        if form == FROM_BF16:
            quantize_block_of(descriptor, tile, out, tl.bfloat16, 2, False, BLOCK_ROWS, BLOCK_COLUMNS, ON_HOPPER)
    if FROM_FP16_WHOLE & FORMS:
        if form == FROM_FP16_WHOLE:
            quantize_block_of(descriptor, tile, out, tl.float16, 2, True, BLOCK_ROWS, BLOCK_COLUMNS, ON_HOPPER)
    if FROM_FP16 & FORMS:
        if form == FROM_FP16:
            quantize_block_of(descriptor, tile, out, tl.float16, 2, False, BLOCK_ROWS, BLOCK_COLUMNS, ON_HOPPER)
    if FROM_FP32_WHOLE & FORMS:
        if form == FROM_FP32_WHOLE:
            quantize_block_of(descriptor, tile, out, tl.float32, 4, True, BLOCK_ROWS, BLOCK_COLUMNS, ON_HOPPER)
    if FROM_FP32 & FORMS:
        if form == FROM_FP32:
            quantize_block_of(descriptor, tile, out, tl.float32, 4, False, BLOCK_ROWS, BLOCK_COLUMNS, ON_HOPPER)
    if MOVES & FORMS:
        is_left = form <= MOVES
        if DIGEST:
            if form == WORDS:
                _copy_words(descriptor, tile, out, sums, TILE_ROWS, TILE_COLUMNS)
            is_left = is_left & (form != WORDS)
        if is_left:
            src = descriptor[5].to(tl.pointer_type(tl.uint8))
            move_tile(descriptor, tile, src, out + descriptor[8], FORMS, TILE_ROWS, TILE_COLUMNS, False)


class CastLaunch:
    """A ``CastTable``'s descriptors, on the items' device or on one that can read them."""

    def __init__(
        self,
        items: Sequence[CastItem],
        out_dtype: torch.dtype,
        block: tuple[int, int],
        segments: Sequence[tuple[int, int]] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.out_dtype = out_dtype
        self.block = block
        self.device = device or items[0].source.device
        is_cuda = self.device.type == "cuda"
        self.on_hopper = is_cuda and torch.cuda.get_device_capability(self.device) >= (9, 0)
        self.in_torch: list[CastItem] = []
        """Items that no kernel covers: a rare dtype, or a block whose sides are not powers of two."""
        descriptors: list[list[int]] = []
        tiles: list[int] = []
        written: list[tuple[CastItem, list[list[int]]]] = []
        for item in items:
            rows, counts = self._quantized(item) if item.is_fp8 else self._moved(item)
            written.append((item, rows))
            descriptors += rows
            tiles += counts
        if segments is None:
            segments = [segment for item in items for segment in item.segments(out_dtype, block)]
        self.segments = segments
        self._apart = self._assign_segments(written)
        """Segments that a second launch digests."""
        self._digest_apart: DigestLaunch | None = None
        self.forms = _few_masks(functools.reduce(operator.or_, (row[0] for row in descriptors), 0))
        if descriptors:
            table = torch.tensor(descriptors, dtype=torch.int64, device=self.device)
            self.owner, table[:, FIRST_TILE.value] = tile_index(tiles, self.device)
            self.table = table

    def run(self, out: Tensor) -> None:
        self._run(out, None)

    def run_with_digests(self, out: Tensor) -> Tensor:
        # The extra sum takes the bytes outside all segments.
        sums = torch.zeros(len(self.segments) + 1, dtype=torch.int64, device=self.device)
        self._run(out, sums)
        if self._apart:
            if self._digest_apart is None:
                offsets, lengths = zip(*(self.segments[index] for index in self._apart), strict=True)
                self._digest_apart = DigestLaunch(offsets, lengths, self.device)
                self._index_apart = torch.tensor(self._apart, device=self.device)
            sums[self._index_apart] = self._digest_apart.run(out)
        return sums[:-1]

    def _run(self, out: Tensor, sums: Tensor | None) -> None:
        if out.data_ptr() % VECTOR_BYTES:
            raise ValueError(f"the bucket's address is not a multiple of {VECTOR_BYTES}")
        if self.forms:
            with on_device(self.device):
                _cast_kernel[(len(self.owner),)](
                    out,
                    self.owner,
                    self.table,
                    sums,
                    FORMS=self.forms,
                    TILE_ROWS=CAST_ROWS,
                    TILE_COLUMNS=CAST_COLUMNS,
                    BLOCK_ROWS=self.block[0],
                    BLOCK_COLUMNS=self.block[1],
                    ON_HOPPER=self.on_hopper,
                    DIGEST=sums is not None,
                    num_warps=CAST_WARPS,
                    maxnreg=MAX_REGISTERS,
                )
        for item in self.in_torch:
            run_in_torch(item, out, self.out_dtype, self.block)

    def _assign_segments(self, written: Sequence[tuple[CastItem, list[list[int]]]]) -> list[int]:
        """Set the digest fields of each item's descriptors; return the segments that they do not fully digest."""
        usual = {WORDS.value, FROM_BF16_WHOLE.value} if self.on_hopper else {WORDS.value}
        order = sorted(range(len(self.segments)), key=self.segments.__getitem__)
        starts = [self.segments[index][0] for index in order]
        missing = [size for _, size in self.segments]
        for item, descriptors in written:
            begin, size = item.segments(self.out_dtype, self.block)[0]
            place = bisect.bisect_right(starts, begin) - 1
            first = begin - starts[place] if place >= 0 else 0
            is_inside = place >= 0 and first + size <= self.segments[order[place]][1] and first % DIGEST_BYTES == 0
            segment = order[place] if is_inside else len(self.segments)
            if is_inside and descriptors and all(row[FORM.value] in usual for row in descriptors):
                missing[segment] -= size
            for row in descriptors:
                if row[FORM.value] == WORDS.value:
                    row[LAST.value] = segment
                    row[POSITION.value] = (first + row[DST.value] - begin) // DIGEST_BYTES
                elif row[FORM.value] > MOVES.value:
                    row[LAST.value] += 2 * segment
                    row[POSITION.value] = first // DIGEST_BYTES
        return [index for index, size in enumerate(missing) if size]

    def _quantized(self, item: CastItem) -> tuple[list[list[int]], list[int]]:
        forms = FP8_FROM.get(item.source.dtype)
        size = item.source.element_size()
        stride = item.source.stride(0) if item.source.size(0) > 1 else 0
        is_plain = item.row_run >= item.rows
        run, run_stride = (ONE_RUN, 0) if is_plain else (item.row_run, item.run_stride)
        # Within a block, the kernel's source offsets have 32 bits.
        crossings = 0 if run % self.block[0] == 0 else self.block[0] // run + 1
        span = stride * (self.block[0] + crossings * run_stride)
        if forms is None or any(side & (side - 1) for side in self.block) or span >= 1 << 31:
            self.in_torch.append(item)
            return [], []
        assert item.scale_offset is not None  # checked by the table
        address = item.source.data_ptr()
        columns = item.columns
        # The output has one byte per element, so the number of columns is its row length in bytes.
        is_whole = is_aligned(address, stride * size, item.out_offset, columns)
        if is_whole:
            columns, stride = columns // VECTOR_BYTES, stride * size // VECTOR_BYTES
        down, across = num_blocks(item.rows, item.columns, self.block)
        # In the order that quantize_block_of reads.
        fields = [forms[is_whole].value, 0, across, item.rows, columns, address, stride, run, item.out_offset]
        fields.append(run_stride)
        return [[*fields, item.scale_offset, int(item.kind == "fp8_block_ue8m0"), 0]], [down * across]

    def _moved(self, item: CastItem) -> tuple[list[list[int]], list[int]]:
        from_dtype = item.source.dtype
        to_dtype = from_dtype if item.kind == "copy" else self.out_dtype
        if form_of(from_dtype, to_dtype) is None:
            self.in_torch.append(item)
            return [], []
        descriptors: list[list[int]] = []
        tiles: list[int] = []
        for matrix in _copies_of(item, to_dtype):
            rows, counts = move_descriptors(matrix, from_dtype, to_dtype, (CAST_ROWS, CAST_COLUMNS), 0)
            descriptors += rows
            tiles += counts
        return descriptors, tiles


def _few_masks(forms: int) -> int:
    """Add the usual forms to a mask, so that most tables share one of two compiled kernels."""
    if not forms:
        return 0
    return forms | WORDS.value | (0 if forms <= MOVES.value else FROM_BF16_WHOLE.value)


def _copies_of(item: CastItem, to_dtype: torch.dtype) -> list[Copy2D]:
    stride, columns = item.source.stride(0), item.columns
    run = min(item.row_run, item.rows)
    num_whole, rest = divmod(item.rows, run)
    size, to_size = item.source.element_size(), to_dtype.itemsize
    found: list[Copy2D] = []
    for first, shape in ((0, (num_whole, run, columns)), (num_whole, (1, rest, columns))):
        source = item.source.data_ptr() + first * item.run_stride * stride * size
        target = item.out_offset + first * run * columns * to_size
        source_strides = (item.run_stride * stride, stride, 1)
        found += matrices(shape, source, source_strides, size, target, (run * columns, columns, 1), to_size)
    return found
