"""Group normalisation of rewards: what an advantage estimator sees of the reward of each sample.

Whitening of per-token advantages is elsewhere: ``slime.algorithms.advantages.whitening``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from slime.utils.errors import DataError

GROUP_CENTRED_ESTIMATORS = frozenset({"grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"})
"""Estimators whose reward is taken relative to the mean of its group."""
GROUP_SCALED_ESTIMATORS = frozenset({"grpo", "gspo", "cispo"})
"""Estimators whose centred reward may also be divided by the standard deviation of its group."""
STD_EPSILON = 1e-6


def post_process_rewards(
    raw_rewards: Sequence[float],
    *,
    n_samples_per_prompt: int,
    rollout_batch_size: int,
    advantage_estimator: str,
    rewards_normalization: bool,
    grpo_std_normalization: bool,
) -> list[float]:
    """The reward of each sample relative to its group:

        (r - mean(group)) / (std(group) + 1e-6)

    The division is made for grpo, gspo and cispo when ``grpo_std_normalization`` is set and a prompt has more than
    one sample; std is the unbiased one.  A group is ``n_samples_per_prompt`` neighbours when there are exactly
    ``n_samples_per_prompt * rollout_batch_size`` samples; with any other count (fan-out, filters) all samples form
    one group.  Estimators that do not compare within a group get the raw rewards back.

    Computed in float64: in float32 the rounding of the mean of equal rewards is not small against 1e-6.

    Source: GRPO, arXiv:2402.03300; without the division: Dr. GRPO, arXiv:2503.20783.
    """
    for position, reward in enumerate(raw_rewards):
        if not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise DataError(
                f"the reward of sample {position} of the rollout is {reward!r}; it must be a finite number; a reward "
                "that is a dict needs --reward-key, a custom reward function must return a number"
            )
    if not rewards_normalization or advantage_estimator not in GROUP_CENTRED_ESTIMATORS or not raw_rewards:
        return [float(reward) for reward in raw_rewards]

    rewards = torch.tensor(raw_rewards, dtype=torch.float64)
    is_grouped = len(raw_rewards) == n_samples_per_prompt * rollout_batch_size
    rewards = rewards.view(-1, n_samples_per_prompt) if is_grouped else rewards.view(1, -1)
    centred = rewards - rewards.mean(dim=-1, keepdim=True)
    is_scaled = grpo_std_normalization and advantage_estimator in GROUP_SCALED_ESTIMATORS
    if is_scaled and n_samples_per_prompt > 1 and rewards.shape[-1] > 1:
        centred = centred / (rewards.std(dim=-1, keepdim=True) + STD_EPSILON)
    return centred.flatten().tolist()
