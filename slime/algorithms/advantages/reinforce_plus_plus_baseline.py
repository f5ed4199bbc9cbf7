"""REINFORCE++ with a baseline: the reward minus the mean of its group, with a KL penalty on each token."""

from __future__ import annotations

from torch import Tensor

from slime.algorithms.advantages.inputs import AdvantageConfig, AdvantageInputs


def reinforce_plus_plus_baseline_advantages(
    inputs: AdvantageInputs, config: AdvantageConfig
) -> tuple[list[Tensor], list[Tensor]]:
    """Return ``A[t] = reward - kl_coef * kl[t]`` as advantages and as returns; rewards are relative to the group mean.

    Source: REINFORCE++, arXiv:2501.03262.
    """
    returns_N = [
        float(reward) - config.kl_coef * kl_R for reward, kl_R in zip(inputs.rewards_N, inputs.kl_N, strict=True)
    ]
    return list(returns_N), returns_N
