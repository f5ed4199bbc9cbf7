"""MXFP4 (OCP Microscaling v1.0) as gpt-oss publishes its experts: 32 numbers of 4 bits share a power of two.

A folder holds ``X_blocks`` [.., G, 16] uint8, two numbers a byte and the lower half first, and ``X_scales`` [.., G]
uint8, the exponents plus 127; they represent ``X`` with the last of its axes, of length 32 G, moved in front of the
one before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.utils.errors import DataError

GROUP = 32
"""Numbers that share an exponent."""
METHOD = "mxfp4"
"""``quant_method`` of the config."""
BLOCKS, SCALES = "_blocks", "_scales"
NUMBERS_PER_BYTE = 2
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


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


def _unpack(packed: Tensor) -> Tensor:
    table = torch.tensor([*_POSITIVE, *(-number for number in _POSITIVE)], device=packed.device)
    pairs = packed.view(torch.uint8)
    return torch.stack([table[(pairs & 15).int()], table[(pairs >> 4).int()]], dim=-1).flatten(-2)
