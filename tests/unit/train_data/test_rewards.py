"""Group normalisation of rewards."""

import pytest

from slime.train_data.rewards import post_process_rewards
from slime.utils.errors import DataError

DEFAULTS = {
    "n_samples_per_prompt": 4,
    "rollout_batch_size": 1,
    "advantage_estimator": "grpo",
    "rewards_normalization": True,
    "grpo_std_normalization": True,
}


def normalise(rewards, **changes):
    return post_process_rewards(rewards, **{**DEFAULTS, **changes})


def test_group_is_centred_and_divided_by_its_unbiased_deviation():
    assert normalise([1, 0, 0, 1]) == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6)


@pytest.mark.parametrize(
    "changes", [{"grpo_std_normalization": False}, {"advantage_estimator": "reinforce_plus_plus_baseline"}]
)
def test_without_deviation_the_group_is_only_centred(changes):
    assert normalise([1, 0, 0, 1], **changes) == [0.5, -0.5, -0.5, 0.5]


def test_equal_rewards_give_no_signal_whatever_their_rounding():
    assert normalise([0.1] * 4) == pytest.approx([0.0] * 4, abs=1e-9)


@pytest.mark.parametrize(
    "changes",
    [{"rewards_normalization": False}, {"advantage_estimator": "ppo"}, {"advantage_estimator": "reinforce_plus_plus"}],
)
def test_others_get_raw_rewards(changes):
    assert normalise([1, 0, 0, 1], **changes) == [1.0, 0.0, 0.0, 1.0]


def test_groups_are_apart_when_the_count_fits_and_one_when_it_does_not():
    settings = {"n_samples_per_prompt": 2, "rollout_batch_size": 2, "grpo_std_normalization": False}
    assert normalise([1, 0, 4, 2], **settings) == [0.5, -0.5, 1.0, -1.0]
    assert normalise([1, 0, 5], **settings) == [-1.0, -2.0, 3.0]


def test_one_sample_per_prompt_is_never_divided():
    assert normalise([3.0, 5.0], n_samples_per_prompt=1, rollout_batch_size=2) == [0.0, 0.0]
    assert normalise([3.0], n_samples_per_prompt=4, rollout_batch_size=8) == [0.0]


@pytest.mark.parametrize("bad", [None, {"score": 1}, float("nan")])
def test_reward_that_is_no_number_is_refused(bad):
    with pytest.raises(DataError, match="sample 1 of the rollout"):
        normalise([1.0, bad])
