"""Rewards relative to their group, as input of the advantage estimators.

This module assigns samples to groups and combines the rewards of samples from one execution (in messages: rollout).
The estimator chooses the baseline (``Estimator.group_baseline``).  Per-token advantages are whitened elsewhere, in
``slime.algorithms.advantages.whitening``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch

from slime.algorithms.advantages import GroupConfig, get_estimator
from slime.algorithms.group_baselines import GroupBaseline
from slime.utils.errors import DataError


def post_process_rewards(
    raw_rewards: Sequence[float],
    *,
    n_samples_per_prompt: int,
    rollout_batch_size: int,
    advantage_estimator: str,
    rewards_normalization: bool,
    grpo_std_normalization: bool,
    group_ids: Sequence[Hashable | None] | None = None,
    rollout_ids: Sequence[Hashable | None] | None = None,
    graded: Sequence[bool] | None = None,
) -> list[float]:
    """Return each sample's reward relative to the executions of the same prompt, ``(r - baseline) / scale``.

    A group is all samples with the same group id; it may have any size and be interleaved with others.  A group of one
    execution gets 0 from estimators that subtract the group mean.  Each execution counts once, with the mean reward of
    its samples, however many samples a fan-out produced.  Ungraded samples get 0 and do not count; if only one of
    several executions was graded, it gets 0 too.  Rewards are returned unchanged if the estimator has no group
    baseline or ``rewards_normalization`` is False.

    Computed in float64, because in float32 the rounding error of the mean of equal rewards is not small against the
    1e-6 added to the standard deviation.

    Args:
        raw_rewards: Reward of each sample, including removed ones.
        n_samples_per_prompt: Executions per prompt.
        rollout_batch_size: Prompts per rollout batch.
        advantage_estimator: Name or import path; ``--advantage-estimator``.
        rewards_normalization: False with ``--disable-rewards-normalization``.
        grpo_std_normalization: False with ``--disable-grpo-std-normalization``.
        group_ids: ``sample.group_index`` of each sample.  If no sample has one, every ``n_samples_per_prompt``
            consecutive samples form a group; there must be ``n_samples_per_prompt * rollout_batch_size`` samples.
        rollout_ids: ``sample.rollout_id`` of each sample; a sample without one is a separate execution.
        graded: ``sample.is_graded`` of each sample; None means all were graded.

    Raises:
        DataError: the samples cannot be assigned to groups.
    """
    baseline = get_estimator(advantage_estimator).group_baseline
    if not rewards_normalization or baseline is None:
        return [float(reward) for reward in raw_rewards]

    ids = _identified(group_ids, len(raw_rewards), n_samples_per_prompt, rollout_batch_size)
    groups: dict[Hashable, list[int]] = {}
    for position, group_id in enumerate(ids):
        groups.setdefault(group_id, []).append(position)
    relative = [0.0] * len(raw_rewards)
    for group_id, positions in groups.items():
        rollouts: dict[Hashable, list[int]] = {}
        for position in positions:
            rollout_id = None if rollout_ids is None else rollout_ids[position]
            key = ("sample", position) if rollout_id is None else ("rollout", rollout_id)
            rollouts.setdefault(key, []).append(position)
        if len(rollouts) > n_samples_per_prompt:
            raise DataError(
                f"the group with group_index {group_id} has {len(rollouts)} rollouts, and --n-samples-per-prompt is "
                f"{n_samples_per_prompt}: their rewards would be compared although their prompts may differ. Give "
                "every prompt its own sample.group_index, and the samples of one rollout the same sample.rollout_id; "
                "or normalize rewards yourself (--custom-reward-post-process-path)"
            )
        members = [[one for one in positions if graded is None or graded[one]] for positions in rollouts.values()]
        compared = [positions for positions in members if positions]
        if len(compared) < min(2, len(rollouts)):
            continue
        for position, reward in _relative_to_group(raw_rewards, compared, baseline, grpo_std_normalization):
            relative[position] = reward
    return relative


def _relative_to_group(
    raw_rewards: Sequence[float], rollouts: Sequence[Sequence[int]], baseline: GroupBaseline, divide_by_std: bool
) -> list[tuple[int, float]]:
    """Return (position, relative reward) of a group's samples, given the positions of each execution's samples."""
    of_rollouts = [sum(raw_rewards[position] for position in members) / len(members) for members in rollouts]
    variances = [
        sum((raw_rewards[position] - mean) ** 2 for position in members) / len(members)
        for members, mean in zip(rollouts, of_rollouts, strict=True)
    ]
    within_std = math.sqrt(sum(variances) / len(variances))
    config = GroupConfig(divide_by_std=divide_by_std, within_std=within_std)
    baseline_G, scale_G = baseline(torch.tensor(of_rollouts, dtype=torch.float64), config)
    return [
        (position, (raw_rewards[position] - centre) / scale)
        for members, centre, scale in zip(rollouts, baseline_G.tolist(), scale_G.tolist(), strict=True)
        for position in members
    ]


def _identified(
    group_ids: Sequence[Hashable | None] | None, num_samples: int, n_samples_per_prompt: int, rollout_batch_size: int
) -> list[Hashable]:
    """Return the group id of every sample."""
    ids = list(group_ids) if group_ids is not None else [None] * num_samples
    named = [group_id for group_id in ids if group_id is not None]
    nameless = num_samples - len(named)
    if nameless == 0:
        return named
    if nameless == num_samples == n_samples_per_prompt * rollout_batch_size:
        return [position // n_samples_per_prompt for position in range(num_samples)]
    raise DataError(
        f"{nameless} of {num_samples} samples have no group_index, and the count is not --rollout-batch-size "
        f"{rollout_batch_size} x --n-samples-per-prompt {n_samples_per_prompt}, so it is unknown which of them answer "
        "the same prompt. Set sample.group_index in the rollout function; or use --custom-reward-post-process-path or "
        "--disable-rewards-normalization"
    )
