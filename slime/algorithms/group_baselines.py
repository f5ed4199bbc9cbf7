"""Baselines of a reward: the other rollouts of the same prompt.

A baseline function takes the rewards of one group and gives a baseline and a scale for each of them; what the
estimator sees is ``(reward - baseline) / scale``.  Who belongs to a group, and how the samples of one rollout share
its reward, is decided in ``slime.train_data.rewards``.

Shapes: G = rollouts of one prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to a group's standard deviation; equal rewards then give 0 and not 0 / 0."""


class Baseline(NamedTuple):
    """The baseline that each reward of a group is compared with."""

    baseline_G: Tensor
    scale_G: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig:
    """The flags of group normalisation."""

    divide_by_std: bool = True
    """False with ``--disable-grpo-std-normalization``."""


GroupBaseline = Callable[[Tensor, GroupConfig], Baseline]
"""``(rewards_G float64, config) -> Baseline``."""


def group_mean(reward_G: Tensor, config: GroupConfig) -> Baseline:
    """Return the mean of the group, and no scale: ``r - mean(r)``.

    A rollout that is alone in its group gets 0.

    Source: REINFORCE++-baseline, arXiv:2501.03262.
    """
    return Baseline(reward_G.mean().expand_as(reward_G), torch.ones_like(reward_G))


def group_mean_and_std(reward_G: Tensor, config: GroupConfig) -> Baseline:
    """Return the mean of the group, and its standard deviation (the unbiased one) as scale:

        (r - mean(r)) / (std(r) + 1e-6)

    Without ``config.divide_by_std``, and for a rollout that is alone in its group, the scale is 1.

    Source: GRPO, arXiv:2402.03300, sec. 4.1.2; without the division: Dr. GRPO, arXiv:2503.20783, sec. 3.2.
    """
    baseline_G, scale_G = group_mean(reward_G, config)
    if config.divide_by_std and len(reward_G) > 1:
        scale_G = (reward_G.std() + STD_EPSILON).expand_as(reward_G)
    return Baseline(baseline_G, scale_G)
