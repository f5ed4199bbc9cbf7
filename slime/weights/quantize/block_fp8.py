"""Matrices of 8-bit floats (e4m3) with one fp32 scale per block, row or matrix.

    scale = max(largest magnitude of the block, 1e-10) / 448
    q     = e4m3(weight / scale),   weight ~ q * scale

448 is the largest finite e4m3 number.  Both quotients are true fp32 divisions, and the cast rounds to nearest, ties to
even, so every path (this one, the Triton kernels, the offline tool, CPU and GPU) produces the same bytes.  A block of
zeros gets the scale 1e-10 / 448 and stays zero.

With ``ue8m0=True`` each scale is rounded up to a power of two, because UE8M0 is a byte that holds only an fp32
exponent.  :func:`transform_scale_ue8m0` packs such scales the way DeepGEMM reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.utils.errors import DataError

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MIN_ABSMAX = 1e-10
"""Lower bound of a block's largest magnitude, so that scales are never zero."""
DEFAULT_BLOCK = (128, 128)
PANEL_ELEMENTS = 1 << 24
"""Elements processed at a time, which bounds fp32 scratch memory to a few times 64 MiB."""
SCALES_PER_WORD = 4
"""Exponents per int32: those of adjacent blocks along the input dimension, the first in the lowest byte."""
TMA_ALIGNMENT_BYTES = 16
"""Alignment of packed scales that the tensor memory accelerator (TMA) needs."""


def num_blocks(rows: int, columns: int, block: tuple[int, int] = DEFAULT_BLOCK) -> tuple[int, int]:
    """Return the number of blocks of a ``[rows, columns]`` matrix per dimension, counting partial blocks."""
    return -(-rows // block[0]), -(-columns // block[1])


def quantize_block(
    weight: Tensor, block: tuple[int, int] = DEFAULT_BLOCK, *, ue8m0: bool = False, name: str | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize with one scale per block.

    Args:
        weight: ``[M, N]`` of bf16, fp16 or fp32; M and N need not be multiples of the block.
        block: rows and columns of a block.
        ue8m0: round scales up to powers of two.
        name: the tensor's name; if given, NaN or infinity raises an error (which synchronizes with the device).

    Returns:
        ``[M, N]`` float8_e4m3fn and ``[ceil(M / rows), ceil(N / columns)]`` fp32, both contiguous.

    Raises:
        ValueError: ``weight`` is not a floating-point matrix, or ``block`` is not positive.
        DataError: ``name`` is given and the weight is not finite.
    """
    _check_matrix(weight)
    if min(block) < 1:
        raise ValueError(f"a block of {block} has no elements; rows and columns of a block must be positive")
    rows, columns = weight.shape
    scale_rows, scale_columns = num_blocks(rows, columns, block)
    quantized = torch.empty(rows, columns, dtype=FP8, device=weight.device)
    scale = torch.empty(scale_rows, scale_columns, dtype=torch.float32, device=weight.device)
    # Whole rows of blocks at a time.
    blocks_at_once = max(1, PANEL_ELEMENTS // max(1, block[0] * columns))
    for first in range(0, scale_rows, blocks_at_once):
        last = min(first + blocks_at_once, scale_rows)
        part = slice(first * block[0], min(last * block[0], rows))
        padded = _padded(weight[part].float(), (last - first) * block[0], scale_columns * block[1])
        tiles = padded.view(last - first, block[0], scale_columns, block[1])
        scale[first:last] = _scales(tiles.abs().amax(dim=(1, 3)), ue8m0)
        tiles = _cast(tiles, scale[first:last, None, :, None])
        quantized[part] = tiles.view(padded.shape)[: part.stop - part.start, :columns]
    if name is not None:
        require_finite(name, scale)
    return quantized, scale


def quantize_tensor(weight: Tensor, *, name: str | None = None) -> tuple[Tensor, Tensor]:
    """Quantize with one scale for the whole tensor.

    Args:
        weight: bf16, fp16 or fp32, of any shape.
        name: see :func:`quantize_block`.

    Returns:
        float8_e4m3fn of the same shape, and fp32 of shape ``[1]``.
    """
    _check_floating(weight)
    absmax = weight.abs().amax().float() if weight.numel() else weight.new_zeros((), dtype=torch.float32)
    scale = _scales(absmax.view(1), False)
    if name is not None:
        require_finite(name, scale)
    return _cast(weight.float(), scale), scale


def quantize_channel(weight: Tensor, *, name: str | None = None) -> tuple[Tensor, Tensor]:
    """Quantize with one scale per row (output channel).

    Args:
        weight: ``[M, N]`` of bf16, fp16 or fp32.
        name: as in :func:`quantize_block`.

    Returns:
        ``[M, N]`` float8_e4m3fn and ``[M, 1]`` fp32.
    """
    _check_matrix(weight)
    return quantize_block(weight, (1, max(1, weight.size(1))), name=name)


def dequantize_block(
    quantized: Tensor, scale: Tensor, block: tuple[int, int] = DEFAULT_BLOCK, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Invert :func:`quantize_block` up to rounding: the fp32 product, then one cast.

    Args:
        quantized: ``[M, N]``, one byte each.
        scale: ``[ceil(M / rows), ceil(N / columns)]``, any floating-point dtype.
        block: rows and columns of a block.

    Raises:
        DataError: the number of scales does not match the number of blocks.
    """
    rows, columns = quantized.shape
    if tuple(scale.shape) != num_blocks(rows, columns, block):
        raise DataError(
            f"{tuple(scale.shape)} scales for a {rows} x {columns} tensor in blocks of {block[0]} x {block[1]}, which "
            f"has {num_blocks(rows, columns, block)}; weight_block_size of the config.json does not fit the tensors"
        )
    result = torch.empty(rows, columns, dtype=dtype, device=quantized.device)
    blocks_at_once = max(1, PANEL_ELEMENTS // max(1, block[0] * columns))
    for first in range(0, scale.size(0), blocks_at_once):
        part = slice(first * block[0], min((first + blocks_at_once) * block[0], rows))
        factors = scale[first : first + blocks_at_once].float()
        factors = factors.repeat_interleave(block[0], 0)[: part.stop - part.start]
        result[part] = _decode(quantized[part]) * factors.repeat_interleave(block[1], 1)[:, :columns]
    return result


def require_finite(name: str, scale: Tensor) -> None:
    """Check that a tensor is finite by its scales: a scale is finite if and only if its block's weights are.

    Raises:
        DataError: the tensor has NaN or infinite elements; the message names it.
    """
    if not bool(torch.isfinite(scale).all()):
        raise DataError(
            f"{name} has NaN or infinite elements, which cannot be quantized; look for the training step or the "
            "checkpoint that made them"
        )


def _check_floating(weight: Tensor) -> None:
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise ValueError(f"only bf16, fp16 and fp32 tensors can be quantized; got {weight.dtype}")


def _check_matrix(weight: Tensor) -> None:
    _check_floating(weight)
    if weight.dim() != 2:
        raise ValueError(f"only matrices have blocks; got a tensor of shape {list(weight.shape)}")


def _scales(absmax: Tensor, ue8m0: bool) -> Tensor:
    """Return fp32 scales for fp32 magnitudes; NaN stays NaN."""
    # A tensor, because torch divides a CUDA tensor by a Python number as a product with its reciprocal, and 1/448 is
    # not exact.
    largest = torch.full((), FP8_MAX, dtype=torch.float32, device=absmax.device)
    scale = absmax.clamp(min=MIN_ABSMAX) / largest
    return round_up_to_power_of_two(scale) if ue8m0 else scale


def _cast(weight: Tensor, scale: Tensor) -> Tensor:
    """Cast fp32 weights to e4m3; clamps because the quotient may exceed 448 by a rounding error."""
    return (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _decode(quantized: Tensor) -> Tensor:
    """Decode one-byte floats to fp32; on a CPU with a 256-entry table, several times as fast as torch's cast."""
    if quantized.device.type != "cpu":
        return quantized.float()
    table = torch.arange(256, dtype=torch.uint8).view(quantized.dtype).float()
    codes = quantized.contiguous().view(torch.uint8).flatten()
    return table.index_select(0, codes.int()).view(quantized.shape)


def _padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Zero-pad the matrix to ``[rows, columns]`` below and to the right; no copy if it already has that shape."""
    if matrix.shape == (rows, columns):
        return matrix.contiguous()
    return torch.nn.functional.pad(matrix, (0, columns - matrix.size(1), 0, rows - matrix.size(0)))


def round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """Round scales (fp32, positive, normal) up to powers of two; NaN and infinity are unchanged."""
    bits = scale.view(torch.int32)
    # A nonzero mantissa carries into the exponent.
    rounded = ((bits + 0x007FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(torch.isfinite(scale), rounded, scale)


def is_power_of_two(scale: Tensor) -> Tensor:
    """Return, elementwise, whether fp32 scales are powers of two."""
    return (scale.view(torch.int32) & 0x007FFFFF) == 0


def transform_scale_ue8m0(scale: Tensor, *, mn: int) -> Tensor:
    """Pack scales as DeepGEMM takes them on Blackwell: one row per weight row, four exponents per word.

    Args:
        scale: ``[ceil(mn / 128), K]`` fp32, powers of two.
        mn: rows of the weight.

    Returns:
        int32 of shape ``[mn, ceil(K / 4)]``, column-major, its columns aligned to 16 bytes.

    Raises:
        ValueError: a scale is not a power of two, or the number of scale rows is wrong.
    """
    block_rows = DEFAULT_BLOCK[0]
    if scale.dim() != 2 or scale.size(0) != -(-mn // block_rows):
        raise ValueError(f"{list(scale.shape)} scales for {mn} rows in blocks of {block_rows}")
    scale = scale.float().contiguous()
    if not bool(is_power_of_two(scale).all()):
        raise ValueError("only powers of two have an eight-bit exponent form; quantize with ue8m0=True")
    exponents = (scale.view(torch.int32) >> 23).to(torch.uint8)
    words = -(-scale.size(1) // SCALES_PER_WORD)
    padded = torch.zeros(scale.size(0), words * SCALES_PER_WORD, dtype=torch.uint8, device=scale.device)
    padded[:, : scale.size(1)] = exponents
    per_row = padded.view(torch.int32).repeat_interleave(block_rows, 0)[:mn]
    step = TMA_ALIGNMENT_BYTES // 4
    aligned_mn = -(-mn // step) * step
    packed = torch.zeros(words, aligned_mn, dtype=torch.int32, device=scale.device)
    packed[:, :mn] = per_row.T
    return packed.T[:mn]
