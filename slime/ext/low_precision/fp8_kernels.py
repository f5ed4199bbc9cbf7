"""Quantization by tiles in Triton and cuBLAS's block-scaled products, for Hopper; ``fp8_linear`` has the formulas.

Shapes: T = tokens, padded to whole tiles; N = outputs and K = inputs, multiples of 128.
"""

from __future__ import annotations

import functools
import logging

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from slime.weights.quantize.block_fp8 import DEFAULT_BLOCK, FP8, FP8_MAX, MIN_ABSMAX, dequantize_block, quantize_block

logger = logging.getLogger(__name__)

TILE = DEFAULT_BLOCK[0]
SCALES_ALIGNMENT = 4
"""cuBLAS reads the scales of 128 x 128 blocks with a leading dimension that is a multiple of this."""
PROOF_ERROR = 1e-2
"""Largest difference from plain numbers, relative to the largest result: bf16 output rounds to 4e-3."""
_MAX = tl.constexpr(FP8_MAX)
_FLOOR = tl.constexpr(MIN_ABSMAX)


@triton.jit
def _quantize_tile(
    source,
    quantized,
    scales,
    num_rows,
    source_stride,
    quantized_stride,
    scales_stride,
    BY_BLOCK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Quantize one 128 x 128 tile: by block, by rows, or (transposed and not by block) by columns."""
    tile_row, tile_column = tl.program_id(0), tl.program_id(1)
    rows = tile_row * SIZE + tl.arange(0, SIZE)
    columns = tile_column * SIZE + tl.arange(0, SIZE)
    offsets = rows.to(tl.int64)[:, None] * source_stride + columns[None, :]
    x = tl.load(source + offsets, mask=(rows < num_rows)[:, None], other=0.0).to(tl.float32)
    if BY_BLOCK:
        largest = tl.max(tl.max(tl.abs(x), axis=1), axis=0)
        scale = tl.div_rn(tl.maximum(largest, _FLOOR), _MAX)
        divisor = tl.zeros([SIZE, SIZE], tl.float32) + scale
        if TRANSPOSED:
            tl.store(scales + tile_column * scales_stride + tile_row, scale)
        else:
            tl.store(scales + tile_row * scales_stride + tile_column, scale)
    elif TRANSPOSED:
        scale_of_column = tl.div_rn(tl.maximum(tl.max(tl.abs(x), axis=0), _FLOOR), tl.zeros([SIZE], tl.float32) + _MAX)
        divisor = tl.zeros([SIZE, SIZE], tl.float32) + scale_of_column[None, :]
        tl.store(scales + tile_row.to(tl.int64) * scales_stride + columns, scale_of_column)
    else:
        scale_of_row = tl.div_rn(tl.maximum(tl.max(tl.abs(x), axis=1), _FLOOR), tl.zeros([SIZE], tl.float32) + _MAX)
        divisor = tl.zeros([SIZE, SIZE], tl.float32) + scale_of_row[:, None]
        tl.store(scales + tile_column.to(tl.int64) * scales_stride + rows, scale_of_row)
    codes = tl.minimum(tl.maximum(tl.div_rn(x, divisor), -_MAX), _MAX).to(tl.float8e4nv)
    if TRANSPOSED:
        targets = columns.to(tl.int64)[:, None] * quantized_stride + rows[None, :]
        tl.store(quantized + targets, tl.trans(codes))
    else:
        tl.store(quantized + rows.to(tl.int64)[:, None] * quantized_stride + columns[None, :], codes)


def _quantize(matrix: Tensor, *, by_block: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return the numbers, padded to whole tiles along the rows of ``matrix``, and the scales as cuBLAS reads them."""
    num_rows, num_columns = matrix.shape
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    tiles = (-(-num_rows // TILE), num_columns // TILE)
    shape = (tiles[0] * TILE, num_columns)
    quantized = torch.empty(shape[::-1] if transposed else shape, dtype=FP8, device=matrix.device)
    if by_block:
        outer, inner = tiles[::-1] if transposed else tiles
        aligned = -(-inner // SCALES_ALIGNMENT) * SCALES_ALIGNMENT
        scales = torch.zeros(outer, aligned, dtype=torch.float32, device=matrix.device)
    else:
        outer, inner = (tiles[0], num_columns) if transposed else (tiles[1], shape[0])
        scales = torch.empty(outer, inner, dtype=torch.float32, device=matrix.device)
    _quantize_tile[tiles](
        matrix,
        quantized,
        scales,
        num_rows,
        matrix.stride(0),
        quantized.stride(0),
        scales.stride(0),
        BY_BLOCK=by_block,
        TRANSPOSED=transposed,
        SIZE=TILE,
        num_warps=8,
    )
    return quantized, scales.t()


def _product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], *, by_block: bool) -> Tensor:
    """Return ``a @ b.T`` in bf16; a by rows, b by blocks or by rows."""
    of_b = F.ScalingType.BlockWise128x128 if by_block else F.ScalingType.BlockWise1x128
    return F.scaled_mm(a[0], b[0].t(), a[1], F.ScalingType.BlockWise1x128, b[1], of_b, output_dtype=torch.bfloat16)


def by_weight(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``q(x) q(weight)^T``: x [T, K], weight [N, K], result [T, N]."""
    rows, blocks = _quantize(x, by_block=False, transposed=False), _quantize(weight, by_block=True, transposed=False)
    return _product(rows, blocks, by_block=True)[: len(x)]


def by_transposed_weight(grad: Tensor, weight: Tensor) -> Tensor:
    """Return ``q(grad) q(weight)``: grad [T, N], weight [N, K], result [T, K]."""
    rows, blocks = _quantize(grad, by_block=False, transposed=False), _quantize(weight, by_block=True, transposed=True)
    return _product(rows, blocks, by_block=True)[: len(grad)]


def over_tokens(grad: Tensor, x: Tensor) -> Tensor:
    """Return ``q(grad^T) q(x^T)^T``: grad [T, N], x [T, K], result [N, K]."""
    columns = [_quantize(matrix, by_block=False, transposed=True) for matrix in (grad, x)]
    return _product(columns[0], columns[1], by_block=False)


@functools.cache
def are_proven(device: torch.device) -> bool:
    """Return True when the three products equal those of dequantized numbers on this device; log why if not."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

    def plain(matrix: Tensor, block: tuple[int, int]) -> Tensor:
        return dequantize_block(*quantize_block(matrix, block), block, dtype=torch.float32)

    x, grad, weight = draw(200, 384), draw(200, 640), draw(640, 384)
    row = (1, TILE)
    blocks = plain(weight, DEFAULT_BLOCK)
    try:
        pairs = [
            (by_weight(x, weight), plain(x, row) @ blocks.t()),
            (by_transposed_weight(grad, weight), plain(grad, row) @ blocks),
            (over_tokens(grad, x), plain(grad.t().contiguous(), row) @ plain(x.t().contiguous(), row).t()),
        ]
        errors = [float((found - wanted).abs().max() / wanted.abs().max()) for found, wanted in pairs]
    except RuntimeError as error:  # cuBLAS is too old for scales by block
        logger.warning("FP8 products are made of bf16 ones: %s", str(error).split("\n")[0])
        return False
    if max(errors) > PROOF_ERROR:
        logger.warning("FP8 products are made of bf16 ones: cuBLAS's differ by %s", errors)
    return max(errors) <= PROOF_ERROR
