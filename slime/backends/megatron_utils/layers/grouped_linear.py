"""One matrix product per expert over tokens sorted by expert, forward and backward.

    y[rows of expert e] = x[rows of expert e] @ weight[e].T

Two ways give the same numbers: torch's grouped matrix product (one kernel, CUDA, bf16; the counts stay on the device)
and a loop over the experts (everywhere).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGNMENT = 16
"""Bytes that a row must be a multiple of for the grouped kernel."""


def has_grouped_product(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped matrix product takes these operands (x [T, in], weight [E, out, in])."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or not x.size(0):
        return False
    row_bytes = (size * x.element_size() for size in weight.shape[1:])
    return hasattr(F, "grouped_mm") and all(size % _ALIGNMENT == 0 for size in row_bytes)


def grouped_linear(x: Tensor, weight: Tensor, tokens_per_expert: Tensor, *, use_grouped_product: bool) -> Tensor:
    """Apply each expert's matrix to its own tokens.

    Args:
        x: [T, in], sorted by expert.
        weight: [E, out, in].
        tokens_per_expert: [E] integers with sum T, on the device or on the host; zeros are fine.
        use_grouped_product: one kernel where torch has one for these operands, else a loop, which needs the counts
            on the host.

    Returns:
        [T, out].
    """
    if use_grouped_product and has_grouped_product(x, weight):
        ends = tokens_per_expert.to(x.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        return _GroupedProduct.apply(x, weight, ends)
    return _LoopedProduct.apply(x, weight, tokens_per_expert.tolist())


class _GroupedProduct(torch.autograd.Function):
    """``F.grouped_mm`` and its two gradients, which are grouped products again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()  # the kernel wants unit strides; an expanded gradient has none
        grad_x = F.grouped_mm(grad, weight, offs=ends) if ctx.needs_input_grad[0] else None
        # The sum over an expert's tokens: both operands are cut along T.  An expert without tokens gets zeros.
        grad_weight = F.grouped_mm(grad.t(), x, offs=ends) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


class _LoopedProduct(torch.autograd.Function):
    """One matrix product after the other, written straight into the whole result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        y = x.new_empty(x.size(0), weight.size(1))
        for rows, out, matrix in zip(x.split(counts), y.split(counts), weight, strict=True):
            torch.mm(rows, matrix.t(), out=out)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        pieces = grad.split(ctx.counts)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(x)
            for piece, out, matrix in zip(pieces, grad_x.split(ctx.counts), weight, strict=True):
                torch.mm(piece, matrix, out=out)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty_like(weight)
            for piece, rows, out in zip(pieces, x.split(ctx.counts), grad_weight, strict=True):
                torch.mm(piece.t(), rows, out=out)  # a sum over no tokens is zero
        return grad_x, grad_weight, None
