"""RLOO from outside the tree: values by hand, and every place that looks up an estimator."""

from __future__ import annotations

import pytest
import torch

from examples.custom_estimator.rloo import leave_one_out, rloo
from slime.algorithms.advantages import AdvantageConfig, AdvantageInputs, GroupConfig, get_estimator
from slime.algorithms.policy_losses import PPO_CLIP
from slime.train_data.rewards import post_process_rewards

PATH = "examples.custom_estimator.rloo.rloo"


def relative(rewards, **changes):
    settings = {
        "n_samples_per_prompt": len(rewards), "rollout_batch_size": 1, "advantage_estimator": PATH,
        "rewards_normalization": True, "grpo_std_normalization": True,
    }  # fmt: skip
    return post_process_rewards(rewards, **settings | changes)


def test_a_reward_is_compared_with_the_mean_of_the_others():
    baseline, scale = leave_one_out(torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64), GroupConfig())
    assert baseline.tolist() == [0.25, 0.75, 0.5]
    assert scale.tolist() == [1.0, 1.0, 1.0]
    assert relative([1.0, 0.0, 0.5]) == [0.75, -0.75, 0.0]


def test_it_is_grpo_without_deviation_times_n_over_n_minus_one():
    rewards = [1.0, 0.0, 0.0, 1.0, 0.3]
    centred = relative(rewards, advantage_estimator="grpo", grpo_std_normalization=False)
    assert relative(rewards) == pytest.approx([5 / 4 * reward for reward in centred])


def test_it_is_found_by_its_import_path_and_used_like_any_other():
    estimator = get_estimator(PATH)
    assert estimator is rloo and estimator.policy_loss is PPO_CLIP
    inputs = AdvantageInputs(rewards_N=[0.75], kl_N=[torch.zeros(3)])
    advantages, returns = estimator.compute(inputs, AdvantageConfig())
    assert advantages[0].tolist() == returns[0].tolist() == [0.75] * 3
