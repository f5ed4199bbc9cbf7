"""Rounding to symmetric four-bit integers and back in one pass over the weights, for quantization-aware training.

The values are those of ``quantize.group_int`` to the bit for finite weights: true fp32 quotients, rounding to nearest
even, scales rounded to the dtype of the weights before they divide.  A NaN makes its group NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slime.weights.quantize.group_int import MIN_SCALE

FLOOR = tl.constexpr(MIN_SCALE)
ROUNDING = tl.constexpr(1.5 * 2**23)
"""Added to and taken from an fp32 number below 2**22, it rounds to nearest even."""
ELEMENTS_PER_PROGRAM = 4096
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _rounding_kernel(source, target, num_groups, GROUP: tl.constexpr, GROUPS: tl.constexpr, TYPE: tl.constexpr):
    """Round GROUPS groups of GROUP neighbours each."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    position = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    exists = group[:, None] < num_groups
    x = tl.load(source + position, mask=exists, other=0.0).to(tl.float32)
    absmax = tl.max(tl.abs(x), axis=1)
    scale = tl.maximum(tl.div_rn(absmax, tl.zeros_like(absmax) + 7.0), FLOOR)
    scale = scale.to(TYPE).to(tl.float32)
    has_nan = tl.max((x != x).to(tl.int32), axis=1) > 0  # noqa: PLR0124 - only a NaN differs from itself
    scale = tl.where(has_nan, float("nan"), scale)
    quotient = tl.div_rn(x, tl.zeros_like(x) + scale[:, None])
    rounded = (quotient + ROUNDING) - ROUNDING
    # Through the unsigned number that is stored, as which a small negative quotient becomes a zero without a sign.
    code = tl.minimum(tl.maximum(rounded + 8.0, 0.0), 15.0)
    tl.store(target + position, ((code - 8.0) * scale[:, None]).to(TYPE), mask=exists)


def launch_rounding(weight: Tensor, group_size: int) -> Tensor:
    """Return the rounded weights.

    Args:
        weight: ``[..., in]`` on a CUDA device, of bf16, fp16 or fp32.
        group_size: a power of two that divides ``in``.
    """
    source = weight.detach().contiguous()
    target = torch.empty_like(source)
    num_groups = source.numel() // group_size
    groups = max(1, ELEMENTS_PER_PROGRAM // group_size)
    if num_groups:
        with torch.cuda.device(source.device):
            _rounding_kernel[(triton.cdiv(num_groups, groups),)](
                source, target, num_groups, GROUP=group_size, GROUPS=groups, TYPE=DTYPES[source.dtype]
            )
    return target
