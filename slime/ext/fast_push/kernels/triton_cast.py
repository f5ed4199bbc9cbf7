"""The launch of ``CastTable``: blocks of FP8, casts and copies of a whole bucket by one kernel.

A program works at one tile: one block of FP8, or a piece of a matrix that is copied or cast (``triton_copy``).  With
digests, tiles of the two usual forms are digested while they are in registers, which spares reading them again;
another launch digests the few segments of other forms.

A block of FP8 is read once, its largest magnitude found, divided and written; the bytes are those of
``quantize.block_fp8``:

* the division by the scale is the exact fp32 quotient.  ``div_rn`` of every element would cost more than reading
  it; the block has one divisor, so its correctly rounded reciprocal is computed once, and corrections with fused
  multiply-adds give the correctly rounded quotient: one for dividends of bf16, as all 2**23 x 128 pairs of
  significands show, two for any (Markstein, "Computation of elementary functions on the IBM RISC System/6000
  processor", 1990);
* Hopper rounds to e4m3 as torch does, to nearest even.  Before Hopper, and in Triton's interpreter, ``div_rn`` and
  integer arithmetic take the place of both.

Rows of bf16 in whole vectors, which is nearly every byte of a push, have their own path, which handles pairs of
elements as words: fewer registers, so more tiles in flight, and fewer instructions.

A NaN or an infinity in a block gives NaN, with whatever sign; everything finite is equal to the bit.
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
VECTOR = tl.constexpr(VECTOR_BYTES)
MAX = tl.constexpr(FP8_MAX)
FLOOR = tl.constexpr(MIN_ABSMAX)
CAST_ROWS, CAST_COLUMNS, CAST_WARPS = 8, 512, 8
"""Tile that is copied or cast, in four-byte words or elements, and warps of a program: the fastest on an H100."""
MAX_REGISTERS = 64
"""Of a thread, so that four programs fit a multiprocessor."""


@triton.jit
def _round_to_e4m3(value):
    """Round fp32 values of magnitude 448 or a rounding error more to e4m3 bytes, in integer arithmetic."""
    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # 20 of 23 bits of the mantissa go, to nearest even; the exponent's bias falls from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 the spacing is 2**-9, as in fp32 from 2**14 on: the addition rounds.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, tl.minimum(normal, 0x7E))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def _reciprocal_of(scale):
    """Return 1 / scale, correctly rounded, and the scale of the corrections."""
    # Against an infinite scale the remainder would be NaN; the quotient of a finite number is zero.
    return tl.div_rn(1.0, scale), tl.where(scale == float("inf"), 0.0, scale)


@triton.jit
def _corrected(quotient, x, reciprocal, scale):
    """Return the quotient corrected by its remainder, divided too.

    The remainder is taken with the opposite sign: so a quotient of -0.0 stays what it is, and -x costs nothing.
    """
    return tl.fma(tl.fma(quotient, scale, x * -1.0), reciprocal * -1.0, quotient)


@triton.jit
def _quotient_in_e4m3(x, scale, ON_HOPPER: tl.constexpr):
    """Return the e4m3 bytes of fp32 ``x`` divided by one fp32 number."""
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
    scale = tl.div_rn(tl.maximum(absmax, FLOOR, propagate_nan=tl.PropagateNan.ALL), MAX)
    bits = scale.to(tl.int32, bitcast=True)
    # A mantissa that is not zero carries into the exponent; NaN and infinity stay.
    rounded = ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where((is_ue8m0 != 0) & (bits < 0x7F800000), rounded, scale)


@triton.jit
def _source_rows(first, run, run_stride, BLOCK_ROWS: tl.constexpr):
    """Return the rows of the source after those of a block: the first, and the distance of each from it."""
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
    """Quantize one block: TYPE and SIZE in bytes of the source's elements; IS_WHOLE when lengths are in vectors.

    Of the descriptor's fields, those of strides of columns and of the target's rows hold: rows of a run, rows from run
    to run, offset of the scales.  LAST is twice the segment of the digest, and one for scales that are powers of two;
    POSITION is the place of the first word in the segment.
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
    # A whole matrix may have more elements than 2**31, a block's rows have not.
    source += first_source.to(tl.int64) * stride
    quantized += first.to(tl.int64) * columns
    mask = (first + row < rows)[:, None] & (column < columns)
    x = tl.load(source + (source_row * stride.to(tl.int32))[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    # As integers the bits have the order of the magnitudes, NaN above all.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    scale = _scale_of(largest.to(tl.float32, bitcast=True), last & 1)
    tl.store((out + scales).to(tl.pointer_type(tl.float32), bitcast=True) + tile, scale)
    tl.store(quantized + (row * columns)[:, None] + column, _quotient_in_e4m3(x, scale, ON_HOPPER), mask=mask)


@triton.jit
def _larger_halves(a, b):
    """Return the maxima of both unsigned halves of two words."""
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def quantize_pairs(
    descriptor, tile, out, sums, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, DIGEST: tl.constexpr
):
    """Quantize one bf16 block in whole vectors, on Hopper: two elements a word, until each is divided.

    With DIGEST the bytes that are written are digested before they leave.
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
    """Copy one tile of the form WORDS and digest it: LAST holds the segment, POSITION where in it the descriptor's
    first 64 bits are."""
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
    """Cast one tile per program.  Forms that the table lacks are not compiled."""
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
    """The table of one list of items, on their device or on one that can read them."""

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
        """Items that no kernel covers: a rare dtype, or a block whose sides are no powers of two."""
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
        """Segments that are digested after they were written."""
        self._digest_apart: DigestLaunch | None = None
        self.forms = _few_masks(functools.reduce(operator.or_, (row[0] for row in descriptors), 0))
        if descriptors:
            table = torch.tensor(descriptors, dtype=torch.int64, device=self.device)
            self.owner, table[:, FIRST_TILE.value] = tile_index(tiles, self.device)
            self.table = table

    def run(self, out: Tensor) -> None:
        self._run(out, None)

    def run_with_digests(self, out: Tensor) -> Tensor:
        # One more, for what is in no segment.
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
            raise ValueError(f"the bucket starts at an address that is no multiple of {VECTOR_BYTES}")
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
        """Tell the descriptors of each item where its digest goes; the segments that they do not digest as a whole."""
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
        # As quantize_block_of reads them.
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
    """Return the forms to compile a kernel for: the usual ones too, so that most tables share one of two kernels."""
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
