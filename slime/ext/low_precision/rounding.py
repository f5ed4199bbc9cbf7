"""Weights rounded to symmetric four-bit integers in the forward pass, with straight-through gradients.

    y = dequantize(quantize(w)),   dL/dw = dL/dy

The values are those of ``GroupInt(4, group_size, True, scale_dtype=w.dtype)`` to the bit: an engine that was pushed
``w`` in its dtype multiplies by what the trainer multiplied by.  CUDA tensors take one launch of a Triton kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime.weights.quantize.group_int import dequantize_group, quantize_group

NUM_BITS = 4


def fake_quantize_int4(weight: Tensor, group_size: int) -> Tensor:
    """Return ``weight`` as an engine with packed integers holds it; its gradient is that of the result.

    Args:
        weight: ``[..., in]`` of bf16, fp16 or fp32, with at least two dimensions; each row is quantized by itself.
        group_size: columns that share a scale.

    Raises:
        ValueError: the groups do not divide the rows.
    """
    columns = weight.size(-1)
    if group_size < 1 or columns % group_size:
        raise ValueError(f"rows of {columns} columns are no whole number of groups of {group_size}")
    return _StraightThrough.apply(weight, group_size)


class _StraightThrough(torch.autograd.Function):
    """Rounding whose gradient is one everywhere: nothing is cut off, because a group's scale follows its maximum."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group_size: int) -> Tensor:
        return rounded_to_int4(weight, group_size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def rounded_to_int4(weight: Tensor, group_size: int, *, use_triton: bool | None = None) -> Tensor:
    """Return the rounded values of :func:`fake_quantize_int4`, without a gradient.

    Args:
        weight: as there.
        group_size: as there.
        use_triton: None takes Triton for CUDA tensors whose group size is a power of two.
    """
    if use_triton is None:
        use_triton = weight.is_cuda and group_size & (group_size - 1) == 0
    if use_triton:
        from slime.ext.low_precision.triton_int4 import launch_rounding

        return launch_rounding(weight, group_size)
    rows = weight.reshape(-1, weight.size(-1))
    quantized, scale, zeros = quantize_group(
        rows,
        num_bits=NUM_BITS,
        groups=rows.size(1) // group_size,
        is_symmetric=True,
        scale_dtype=weight.dtype,
    )
    return dequantize_group(quantized, scale, zeros, num_bits=NUM_BITS, dtype=weight.dtype).view(weight.shape)
