"""RLOO, as a plug-in: ``--advantage-estimator examples.custom_estimator.rloo.rloo``.

A whole estimator from outside slime's tree: what a group's rewards are measured against, and how the result is spread
over the tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.algorithms.advantages import Baseline, Estimator, GroupConfig, group_relative_advantages


def leave_one_out(reward_G: Tensor, config: GroupConfig) -> Baseline:
    """The mean of the others, so that a rollout's own reward takes no part in its baseline:

        A[i] = r[i] - sum(r[j], j != i) / (G - 1)

    A rollout that is alone in its group has no others: it is its own baseline, and teaches nothing.

    Args:
        reward_G: float64, one reward for each rollout of a prompt.
        config: ``--disable-grpo-std-normalization`` has no say here; RLOO does not divide.

    Source: Ahmadian et al., "Back to basics", arXiv:2402.14740, eq. 8; Kool et al., 2019.
    """
    others = len(reward_G) - 1
    baseline_G = (reward_G.sum() - reward_G) / others if others else reward_G
    return Baseline(baseline_G, torch.ones_like(reward_G))


rloo = Estimator(compute=group_relative_advantages, group_baseline=leave_one_out)
