"""RLOO, as a plug-in: ``--advantage-estimator examples.custom_estimator.rloo.rloo``.

A complete estimator defined outside slime: the baseline of a group's rewards, and the advantage of each token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.algorithms.advantages import Baseline, Estimator, GroupConfig, group_relative_advantages


def leave_one_out(reward_G: Tensor, config: GroupConfig) -> Baseline:
    """Use the mean reward of the other executions as baseline:

        A[i] = r[i] - sum(r[j], j != i) / (G - 1)

    The only execution in a group is its own baseline, so its advantage is 0.

    Args:
        reward_G: float64, one reward for each execution of a prompt.
        config: Ignored: RLOO does not divide by the standard deviation.

    Source: Ahmadian et al., "Back to basics", arXiv:2402.14740, eq. 8; Kool et al., 2019.
    """
    others = len(reward_G) - 1
    baseline_G = (reward_G.sum() - reward_G) / others if others else reward_G
    return Baseline(baseline_G, torch.ones_like(reward_G))


rloo = Estimator(compute=group_relative_advantages, group_baseline=leave_one_out)
