"""Low-rank adapters: ``y = W x + scale * B (A x)`` (LoRA, arXiv:2106.09685).

Megatron joins matrices that Hugging Face keeps apart (queries, keys and values; gates and ups).  Each of these *parts*
has a separate A, as PEFT has it, and B has the rows of the joined matrix, each of which belongs to one part.

Shapes: P = parts, r = rank, N = rows (outputs), K = columns (inputs); an expert axis may precede them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def widened(b: Tensor, part_of_row: Tensor | None, num_parts: int) -> Tensor:
    """Return [.., N, P * r]: row i of ``b`` in the columns of its part, zeros in the others.

    Args:
        b: [.., N, r].
        part_of_row: [N], -1 for a row without adapter; None where all rows belong to the only part.
        num_parts: P.
    """
    if part_of_row is None:
        return b
    parts = torch.arange(num_parts, device=b.device)
    one_hot = (part_of_row[:, None] == parts).to(b.dtype)
    return (b[..., None, :] * one_hot[..., None]).flatten(-2)


def merged(weight: Tensor, a: Tensor, b: Tensor, part_of_row: Tensor | None, scale: float) -> Tensor:
    """Return ``weight + scale * B A``, summed in fp32, in the dtype of ``weight``.

    Args:
        weight: [.., N, K].
        a: [.., P, r, K].
        b: [.., N, r].
        part_of_row: as in :func:`widened`.
        scale: alpha over rank.
    """
    wide = widened(b.float(), part_of_row, a.size(-3))
    return (weight.float() + scale * (wide @ a.float().flatten(-3, -2))).to(weight.dtype)
