"""MXFP4 (OCP Microscaling v1.0): 32 numbers of 4 bits share a power of two.

Experts of gpt-oss: ``X_blocks`` [.., G, 16] uint8, two numbers a byte and the lower half first, and ``X_scales``
[.., G] uint8, the exponents plus 127; they represent ``X`` with the last of its axes, of length 32 G, moved in front
of the one before it.

Experts of DeepSeek-V4: ``X.weight`` [M, N / 2] int8, in the same order, and ``X.scale`` [M, N / 32] float8_e8m0fnu.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from slime.utils.errors import DataError
from slime.weights.quantize.block_fp8 import round_up_to_power_of_two

GROUP = 32
"""Numbers that share an exponent."""
METHOD = "mxfp4"
"""``quant_method`` of the config."""
BLOCKS, SCALES = "_blocks", "_scales"
NUMBERS_PER_BYTE = 2
FP4_CODES = ("I8", "U8")
"""Two numbers of e2m1 a byte, as safetensors spells the dtype."""
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127
_SIGN = 8
_MIN_SCALE = 2.0**-126
"""Of a group of zeros, or of smaller numbers."""


def dequantize(name: str, blocks: Tensor, scales: Tensor) -> Tensor:
    """Return ``X`` in bf16, which holds every product of a number and its scale exactly.

    Args:
        blocks: [.., rows, G, 16].
        scales: [.., rows, G].

    Returns:
        [.., 32 G, rows].

    Raises:
        DataError: shapes or dtypes do not fit.
    """
    if blocks.shape[:-1] != scales.shape or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise DataError(
            f"{name}{BLOCKS} is {blocks.dtype} {list(blocks.shape)} and {name}{SCALES} {scales.dtype} "
            f"{list(scales.shape)}; MXFP4 has uint8 [.., G, 16] and [.., G]"
        )
    exponents = scales.int()[..., None] - _EXPONENT_BIAS
    weight = torch.ldexp(_unpack(blocks), exponents).to(torch.bfloat16)
    return weight.flatten(-2).transpose(-1, -2)


def multiply_out(packed: Tensor, scales: Tensor) -> Tensor:
    """Return the matrix in bf16, exactly, that rows of packed numbers and their scales represent (DeepSeek-V4).

    Args:
        packed: ``[M, N / 2]`` of one byte each, in the order of a block.
        scales: ``[M, N / 32]``, powers of two.
    """
    return (_unpack(packed) * scales.float().repeat_interleave(GROUP, -1)).to(torch.bfloat16)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix to what :func:`multiply_out` takes.

    The scale of a group is the least power of two by which its numbers come to at most 6; numbers are rounded to the
    nearest, ties to the one whose last bit is 0.

    Args:
        weight: ``[M, N]`` of bf16, fp16 or fp32, N a multiple of 32.

    Returns:
        ``[M, N / 2]`` int8 and ``[M, N / 32]`` float8_e8m0fnu.  The scale of a group with a NaN is one.
    """
    rows, columns = weight.shape
    groups = weight.float().reshape(rows, columns // GROUP, GROUP)
    largest = torch.full((), _POSITIVE[-1], dtype=torch.float32, device=weight.device)
    scales = round_up_to_power_of_two((groups.abs().amax(-1) / largest).clamp(min=_MIN_SCALE))
    magnitudes = (groups / scales[..., None]).abs()
    codes = torch.zeros(groups.shape, dtype=torch.uint8, device=weight.device)
    for code, (low, high) in enumerate(pairwise(_POSITIVE)):
        middle = (low + high) / 2
        codes += magnitudes > middle if code % 2 == 0 else magnitudes >= middle
    codes += _SIGN * torch.signbit(groups)
    pairs = codes.view(rows, columns // NUMBERS_PER_BYTE, NUMBERS_PER_BYTE)
    packed = (pairs[..., 0] | pairs[..., 1] << 4).view(torch.int8)
    return packed, scales.to(torch.float8_e8m0fnu)


def _unpack(packed: Tensor) -> Tensor:
    table = torch.tensor([*_POSITIVE, *(-number for number in _POSITIVE)], device=packed.device)
    pairs = packed.view(torch.uint8)
    return torch.stack([table[(pairs & 15).int()], table[(pairs >> 4).int()]], dim=-1).flatten(-2)
