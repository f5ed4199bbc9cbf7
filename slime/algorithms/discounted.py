"""Discounted sums over ragged sequences, computed in parallel over time.

Shapes: B = sequences, L = steps of the longest; N = sequences of a ragged list.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def discounted_suffix_sums(values_BL: Tensor, factor: float) -> Tensor:
    """Return the discounted sum from each step to the end:

        y[t] = x[t] + factor * y[t + 1],    y = 0 beyond the end

    Uses doubling: after pass k every y holds the sum over 2^k steps, so L steps take log2(L) passes over the tensor
    instead of L dependent ones.  Trailing zeros do not change the result, so sequences may be padded.
    """
    sums_BL = values_BL.clone()
    span, weight = 1, float(factor)
    while span < values_BL.shape[-1] and weight != 0.0:
        ahead_BL = sums_BL[..., span:].clone()
        sums_BL[..., :-span] += weight * ahead_BL
        span, weight = 2 * span, weight * weight
    return sums_BL


def ragged_discounted_sums(values_N: Sequence[Tensor], factor: float) -> list[Tensor]:
    """Apply ``discounted_suffix_sums`` to each sequence of a ragged list."""
    if not values_N:
        return []
    sums_BL = discounted_suffix_sums(pad_sequence(list(values_N), batch_first=True), factor)
    return [sums_L[: len(values)] for sums_L, values in zip(torch.unbind(sums_BL), values_N, strict=True)]
