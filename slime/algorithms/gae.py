"""Generalized advantage estimation (GAE), with the parallel scan of ``discounted``.

Shapes: N = sequences of a ragged list, each [R], one entry per response token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime.algorithms.discounted import ragged_discounted_sums


def generalised_advantages(
    rewards_N: Sequence[Tensor], values_N: Sequence[Tensor], *, gamma: float, lambd: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Compute the advantage and return of each token:

        delta[t] = r[t] + gamma * V[t + 1] - V[t]
        A[t] = delta[t] + gamma * lambd * A[t + 1],    return[t] = A[t] + V[t]

    Rewards, values and advantages beyond the last token are 0: an episode ends with its response.

    Args:
        rewards_N: [R] each.
        values_N: [R] each, the critic's value before each token; constant.
        gamma: Discount factor per token.
        lambd: 1 is Monte Carlo, 0 is one-step temporal difference.

    Returns:
        ``(advantages_N, returns_N)``.

    Source: Schulman et al., "High-dimensional continuous control using generalized advantage estimation",
        arXiv:1506.02438, eq. 16.
    """
    deltas_N = []
    for rewards_R, values_R in zip(rewards_N, values_N, strict=True):
        next_values_R = torch.cat([values_R[1:], values_R.new_zeros(min(len(values_R), 1))])
        deltas_N.append(rewards_R + gamma * next_values_R - values_R)
    advantages_N = ragged_discounted_sums(deltas_N, gamma * lambd)
    returns_N = [advantages_R + values_R for advantages_R, values_R in zip(advantages_N, values_N, strict=True)]
    return advantages_N, returns_N
