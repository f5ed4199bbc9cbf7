"""MXFP4 (OCP Microscaling v1.0): 32 four-bit numbers share a power-of-two scale.

gpt-oss experts: ``X_blocks`` [.., rows, G, 16] uint8 holds two numbers per byte, low half first, and ``X_scales``
[.., rows, G] uint8 the exponents plus 127.  Multiplied out, [.., rows, 32 G] is ``X`` with its last two axes swapped.

DeepSeek-V4 experts: ``X.weight`` [M, N / 2] int8, in the same byte order, and ``X.scale`` [M, N / 32] float8_e8m0fnu.
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
"""``quant_method`` in the config."""
BLOCKS, SCALES = "_blocks", "_scales"
NUMBERS_PER_BYTE = 2
FP4_CODES = ("I8", "U8")
"""safetensors' dtype codes for bytes that pack two e2m1 numbers."""
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127
_SIGN = 8
_MIN_SCALE = 2.0**-126
"""Lower bound of scales: the scale of a group of zeros."""


def dequantize(name: str, blocks: Tensor, scales: Tensor) -> Tensor:
    """Return ``X`` in bf16, which represents every product of a number and its scale exactly.

    Args:
        blocks: [.., rows, G, 16].
        scales: [.., rows, G].

    Returns:
        [.., 32 G, rows].

    Raises:
        DataError: shapes or dtypes do not match.
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
    """Return the exact bf16 matrix ``[M, N]`` represented by packed numbers and their scales (DeepSeek-V4).

    Args:
        packed: ``[M, N / 2]``, one byte each, low half first.
        scales: ``[M, N / 32]``, powers of two.
    """
    return (_unpack(packed) * scales.float().repeat_interleave(GROUP, -1)).to(torch.bfloat16)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix into the arguments of :func:`multiply_out`.

    A group's scale is the smallest power of two that brings its magnitudes to at most 6.  Numbers are rounded to
    nearest, ties to even.

    Args:
        weight: ``[M, N]`` of bf16, fp16 or fp32, N a multiple of 32.

    Returns:
        ``[M, N / 2]`` int8 and ``[M, N / 32]`` float8_e8m0fnu.  A group with a NaN has a NaN scale.
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
