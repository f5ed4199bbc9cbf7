"""One block of FP8: read once, its largest magnitude found, divided and written.

The bytes are those of ``quantize.block_fp8``:

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

import triton
import triton.language as tl

from slime.ext.fast_push.kernels.copy_2d import VECTOR_BYTES
from slime.ext.fast_push.kernels.triton_digest import add_digest
from slime.weights.quantize.block_fp8 import FP8_MAX, MIN_ABSMAX

MAX = tl.constexpr(FP8_MAX)
FLOOR = tl.constexpr(MIN_ABSMAX)
VECTOR = tl.constexpr(VECTOR_BYTES)


@triton.jit
def _round_to_e4m3(value):
    """Round fp32 values of magnitude 448 or a rounding error more to e4m3 bytes, in integer arithmetic."""
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
    """Return the scale of a block with this largest magnitude."""
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
    POSITION is that of the first word in the segment.
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
