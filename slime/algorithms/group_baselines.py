"""Reward baselines computed from all executions of the same prompt.

A baseline function takes the rewards of one group and returns a baseline and a scale for each; the estimator gets
``(reward - baseline) / scale``.  ``slime.train_data.rewards`` forms the groups and combines the rewards of samples
from one execution.

Shapes: G = executions of one prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, so that equal rewards give 0 instead of 0 / 0."""


class Baseline(NamedTuple):
    """Baseline and scale of each reward in a group."""

    baseline_G: Tensor
    scale_G: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig:
    """Flags of group normalization."""

    divide_by_std: bool = True
    """False with ``--disable-grpo-std-normalization``."""
    within_std: float = 0.0
    """Deviation within rollouts that were cut into samples: the root of the mean, over the rollouts of the group, of
    the variance of a rollout's rewards.  0 where all samples of a rollout have one reward."""


GroupBaseline = Callable[[Tensor, GroupConfig], Baseline]
"""``(rewards_G float64, config) -> Baseline``."""


def group_mean(reward_G: Tensor, config: GroupConfig) -> Baseline:
    """Use the mean of the group as baseline, with scale 1: ``r - mean(r)``.

    The only execution in its group gets 0.

    Source: REINFORCE++-baseline, arXiv:2501.03262.
    """
    return Baseline(reward_G.mean().expand_as(reward_G), torch.ones_like(reward_G))


def group_mean_and_std(reward_G: Tensor, config: GroupConfig) -> Baseline:
    """Use the mean of the group as baseline and its unbiased standard deviation as scale:

        (r - mean(r)) / (sqrt(std(r)^2 + within_std^2) + 1e-6)

    ``config.within_std`` bounds the samples of rollouts whose means are equal: 1e-6 alone would not.

    The scale is 1 without ``config.divide_by_std``, and in a group of one execution.

    Source: GRPO, arXiv:2402.03300, sec. 4.1.2; without the division: Dr. GRPO, arXiv:2503.20783, sec. 3.2.
    """
    baseline_G, scale_G = group_mean(reward_G, config)
    if config.divide_by_std and len(reward_G) > 1:
        spread = torch.hypot(reward_G.std(), reward_G.new_tensor(config.within_std))
        scale_G = (spread + STD_EPSILON).expand_as(reward_G)
    return Baseline(baseline_G, scale_G)
