"""Group normalization of rewards."""

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


RLOO = "examples.custom_estimator.rloo.rloo"


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline", RLOO])
@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize("standin", [0.0, 1.0, -7.0])
def test_what_was_not_graded_is_in_no_statistic_of_its_group(estimator, std, standin):
    flags = {"advantage_estimator": estimator, "grpo_std_normalization": std, "group_ids": [0] * 4}
    failed = {"graded": [True, True, False, True]}
    assert normalise([1, 1, standin, 1], **flags, **failed) == [0.0] * 4
    first, second, third = normalise([1, 0, 0.5], **flags | {"group_ids": [0] * 3})
    assert normalise([1, 0, standin, 0.5], **flags, **failed) == [first, second, 0.0, third]
    assert normalise([1, 0, standin, 0.5], **flags, graded=[True, False, False, False]) == [0.0] * 4
    assert normalise([1, 0, standin, 0.5], **flags, graded=[False] * 4) == [0.0] * 4


def test_a_rollout_has_the_mean_of_its_graded_samples():
    flags = {"n_samples_per_prompt": 2, "grpo_std_normalization": False, "group_ids": [0] * 3}
    relative = normalise([1, 0, 0], **flags, rollout_ids=[5, 5, 6], graded=[True, False, True])
    assert relative == [0.5, 0.0, -0.5]


def test_equal_rewards_give_no_signal_whatever_their_rounding():
    assert normalise([0.1] * 4) == pytest.approx([0.0] * 4, abs=1e-9)


@pytest.mark.parametrize(
    "changes",
    [{"rewards_normalization": False}, {"advantage_estimator": "ppo"}, {"advantage_estimator": "reinforce_plus_plus"}],
)
def test_others_get_raw_rewards(changes):
    assert normalise([1, 0, 0, 1], **changes) == [1.0, 0.0, 0.0, 1.0]


CENTRED = {"n_samples_per_prompt": 2, "rollout_batch_size": 2, "grpo_std_normalization": False}


def test_without_group_ids_neighbours_are_a_group_when_the_count_fits():
    assert normalise([1, 0, 4, 2], **CENTRED) == [0.5, -0.5, 1.0, -1.0]
    assert normalise([1, 0, 4, 2], **CENTRED, group_ids=[None] * 4) == [0.5, -0.5, 1.0, -1.0]


def test_groups_are_told_by_their_ids_wherever_their_samples_stand():
    assert normalise([1, 4, 0, 2], **CENTRED, group_ids=[7, 3, 7, 3]) == [0.5, 1.0, -0.5, -1.0]


def test_uneven_and_filtered_groups_keep_to_themselves():
    # The original treats five samples of three prompts as one group of five, whose mean is 4.
    rewards, ids = [1, 0, 9, 4, 6], [0, 0, 1, 2, 2]
    settings = {"n_samples_per_prompt": 2, "rollout_batch_size": 4, "grpo_std_normalization": False}
    assert normalise(rewards, **settings, group_ids=ids) == [0.5, -0.5, 0.0, -1.0, 1.0]


def test_a_count_that_fits_by_accident_does_not_move_samples_into_other_groups():
    settings = {"n_samples_per_prompt": 3, "rollout_batch_size": 2, "grpo_std_normalization": False}
    relative = normalise([3, 0, 0, 6, 2, 10], **settings, group_ids=[0, 0, 0, 1, 1, 2])
    assert relative == [2.0, -1.0, -1.0, 2.0, -2.0, 0.0]


def test_a_rollout_counts_once_however_many_samples_it_was_cut_into():
    whole = normalise([1, 0], n_samples_per_prompt=2, group_ids=[0, 0])
    cut = normalise([1, 1, 1, 0], n_samples_per_prompt=2, group_ids=[0] * 4, rollout_ids=[5, 5, 5, 6])
    assert cut == pytest.approx([whole[0]] * 3 + [whole[1]])
    # Samples of one rollout with different rewards: the rollout's reward is their mean, 2; the group's mean is 1.
    own = {"n_samples_per_prompt": 2, "grpo_std_normalization": False, "group_ids": [0] * 3, "rollout_ids": [5, 5, 6]}
    assert normalise([1, 3, 0], **own) == [0.0, 2.0, -1.0]


def test_rollouts_of_equal_means_are_divided_by_the_deviation_within_them():
    # Means .5, .5 and .5; variances within them 0, .25 and .125, whose mean is .125.
    cut = normalise([0.5, 1, 0, 0.75, 0, 0.75], group_ids=[0] * 6, rollout_ids=[1, 2, 2, 3, 3, 3])
    assert cut == pytest.approx([value / 0.125**0.5 for value in (0, 0.5, -0.5, 0.25, -0.5, 0.25)], rel=1e-5)
    # Means 2 and 0, whose unbiased variance is 2; variances 1 and 0 within them, whose mean is .5.
    cut = normalise([1, 3, 0], n_samples_per_prompt=2, group_ids=[0] * 3, rollout_ids=[5, 5, 6])
    assert cut == pytest.approx([value / 2.5**0.5 for value in (0, 2, -1)], rel=1e-5)


def test_a_rollout_alone_in_its_group_gives_no_signal_and_is_never_divided():
    assert normalise([3.0, 5.0], n_samples_per_prompt=1, rollout_batch_size=2) == [0.0, 0.0]
    assert normalise([3.0, 1.0, 0.0], group_ids=[0, 1, 1])[0] == 0.0
    assert normalise([3.0, 3.0], group_ids=[0, 0], rollout_ids=[1, 1]) == [0.0, 0.0]


def test_samples_that_nobody_can_group_are_refused():
    with pytest.raises(DataError, match="3 of 3 samples have no group_index.*--custom-reward-post-process-path"):
        normalise([1, 0, 5], **CENTRED)
    with pytest.raises(DataError, match="1 of 4 samples have no group_index"):
        normalise([1, 0, 5, 2], **CENTRED, group_ids=[0, 0, 1, None])
    assert normalise([1, 0, 5], **{**CENTRED, "rewards_normalization": False}) == [1.0, 0.0, 5.0]


def test_prompts_that_share_a_group_index_are_refused():
    with pytest.raises(DataError, match="group_index 0 has 4 rollouts, and --n-samples-per-prompt is 2"):
        normalise([1, 0, 5, 2], **CENTRED, group_ids=[0] * 4)


def test_a_rollout_without_samples_is_left_to_the_conversion():
    assert normalise([], rollout_batch_size=0) == []
