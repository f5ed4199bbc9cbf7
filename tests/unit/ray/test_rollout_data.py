"""A plug-in that returns the wrong shape is named with its flag before the train data are split."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

import numpy as np
import pytest

from slime.flags.parse import build_parser
from slime.flags.reward import RewardConfig
from slime.ray.rollout_data import split_for_ranks, train_data_from_samples
from slime.rollout.rm_hub.policy import grade_by_policy
from slime.utils.errors import DataError, HookError
from slime.utils.types import Sample
from tests.flag_values import args_with


def sample(**fields: Any) -> Sample:
    values = {"index": 0, "tokens": [1, 2, 3], "response_length": 1, "reward": 1.0, "status": Sample.Status.COMPLETED}
    return Sample(**values | fields)


def train_data(samples: list[Sample], **flags: Any) -> dict[str, Any]:
    plain = {"rollout_batch_size": 1, "rewards_normalization": False, "rm_type": "math"}
    return train_data_from_samples(args_with(**plain | flags), samples)


def one_list(args, samples):
    return [1.0]


def no_columns(args, samples):
    return {"tokens": [[1]]}


def nothing(args, samples):
    return None


def path(function) -> str:
    return f"{__name__}.{function.__name__}"


def test_rewards_of_a_plug_in_are_two_lists():
    with pytest.raises(HookError, match=r"--custom-reward-post-process-path .*one_list returned list; .* two lists"):
        train_data([sample()], custom_reward_post_process_path=path(one_list))


@pytest.mark.parametrize(
    ("function", "says"), [(no_columns, "a dict without response_lengths, rewards"), (nothing, "NoneType")]
)
def test_a_converter_gives_the_columns_that_training_needs(function, says):
    with pytest.raises(HookError, match=f"--custom-convert-samples-to-train-data-path .*returned {says}"):
        train_data([sample()], custom_convert_samples_to_train_data_path=path(function))


def documented_columns(args, samples):
    count = len(samples)
    return {"tokens": [[1, 2]] * count, "response_lengths": [1] * count, "rewards": [0.5] * count} | {
        "loss_masks": [[1]] * count
    }


def test_each_sample_of_a_converter_is_its_own_rollout_unless_samples_share_one():
    flags = {"custom_convert_samples_to_train_data_path": path(documented_columns)}
    assert train_data([sample(), sample()], **flags).rollout_ids == [0, 1]
    with pytest.raises(HookError, match="without rollout_ids"):
        train_data([sample(rollout_id=4), sample(rollout_id=4)], **flags)


@pytest.mark.parametrize("reward", [None, "good", float("nan"), {"score": 1}, [1.0]])
def test_a_reward_that_is_no_number_is_shown(reward):
    with pytest.raises(DataError, match=r"reward of sample 0 .* --reward-key, .* --custom-rm-path"):
        train_data([sample(reward=reward)])


@pytest.mark.parametrize("reward", [None, True, 0.5])
def test_with_a_reward_key_the_reward_is_a_dict_that_has_it(reward):
    with pytest.raises(DataError, match="sample 0 by --custom-rm-path mine.grade .*entry 'score' .--reward-key. is a"):
        train_data([sample(reward=reward)], reward_key="score", custom_rm_path="mine.grade")
    assert train_data([sample(reward={"score": 0.5})], reward_key="score").rewards == [0.5]


def test_a_truth_value_and_a_number_of_numpy_are_rewards():
    samples = [sample(reward=True), sample(reward=np.float32(0.5))]
    assert train_data(samples, rollout_batch_size=2).rewards == [1.0, 0.5]


def too_few(args, samples):
    return [1.0], []


def no_lists(args, samples):
    return None, None


@pytest.mark.parametrize(("function", "says"), [(too_few, "0 rewards to train on for 1"), (no_lists, "NoneType raw")])
def test_rewards_of_a_plug_in_are_as_many_as_the_samples(function, says):
    with pytest.raises(HookError, match=f"--custom-reward-post-process-path .*{function.__name__} returned {says}"):
        train_data([sample()], custom_reward_post_process_path=path(function))


def nan_rewards(args, samples):
    return [1.0] * len(samples), [float("nan")] * len(samples)


def text_rewards(args, samples):
    return [1.0] * len(samples), ["1.0"] * len(samples)


def raises(args, samples):
    raise ZeroDivisionError("std of one")


PARALLEL = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}


def split(samples: list[Sample], **flags: Any) -> Any:
    """Pass samples to ranks as ``RolloutManager.generate`` does."""
    args = parse(
        "--num-rollout 1 --rollout-batch-size 1 --n-samples-per-prompt 1 --global-batch-size 1 --micro-batch-size 1"
    )
    for name, value in ({"disable_rewards_normalization": True, "rewards_normalization": False} | flags).items():
        setattr(args, name, value)
    return split_for_ranks(args, train_data_from_samples(args, samples), PARALLEL)


def parse(words: str) -> Namespace:
    args = build_parser(with_engine_flags=False).parse_known_args(words.split())[0]
    args.grpo_std_normalization = True
    return args


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"loss_mask": [7]}, "sample 0 has 7 in its loss mask; it may have 0 and 1 only"),
        ({"loss_mask": [0.5]}, r"sample 0 has \[0.5\] in loss_masks; these must be whole numbers"),
        ({"loss_mask": ["1"]}, "a loss mask holds .*; it may have 0 and 1 only"),
        ({"loss_mask": 7}, "sample 0 has .7. for entries in loss_mask and response_length 1"),
        ({"rollout_log_probs": [float("nan")]}, "sample 0 has nan in rollout_log_probs, at a trained token"),
        ({"rollout_log_probs": ["x"]}, r"sample 0 has \['x'\] in rollout_log_probs; these must be numbers"),
        ({"tokens": [1.5, 2, 3]}, r"sample 0 has \[1.5, 2, 3\] in tokens; these must be whole numbers"),
        ({"tokens": [None, 2, 3]}, r"sample 0 has \[None, 2, 3\] in tokens; these must be numbers"),
    ],
)
def test_values_that_cannot_be_trained_on_name_the_sample_and_the_plug_in(fields, says):
    with pytest.raises(DataError, match=says) as error:
        split([sample(**fields)], custom_generate_function_path="mine.generate")
    if "holds" not in says and "loss_mask and" not in says:
        assert "--custom-generate-function-path mine.generate" in str(error.value)


def test_what_is_not_trained_may_be_anything():
    (data,) = split([sample(tokens=[1, 2, 3], loss_mask=[0], rollout_log_probs=[float("nan")])])
    assert data.loss_masks[0].tolist() == [0]


@pytest.mark.parametrize(("function", "says"), [(nan_rewards, "'nan' .float"), (text_rewards, "'1.0' .str")])
def test_rewards_of_a_plug_in_are_finite_numbers(function, says):
    with pytest.raises(
        DataError, match=f"sample 0 has the reward {says}.*--custom-reward-post-process-path .*{function.__name__}"
    ):
        split([sample()], custom_reward_post_process_path=path(function))


def test_what_a_plug_in_raises_is_told_under_its_flag():
    with pytest.raises(ZeroDivisionError) as error:
        train_data([sample()], custom_reward_post_process_path=path(raises))
    first, *frames = error.value.__notes__[0].splitlines()
    assert first == f"--custom-reward-post-process-path {path(raises)} raised ZeroDivisionError: std of one"
    assert "in raises" in frames[0]


@pytest.mark.parametrize("key", [None, "score"])
def test_a_failed_grading_moves_no_advantage_of_its_group(key):
    async def fails() -> list[float]:
        raise KeyError("x")

    rewards = [1.0, 1.0, 1.0, None] if key is None else [{key: 1.0}] * 3 + [None]
    group = [sample(index=i, group_index=0, rollout_id=i, reward=reward) for i, reward in enumerate(rewards)]
    [group[3].reward] = asyncio.run(
        grade_by_policy(RewardConfig.of(Namespace(reward_key=key)), group[3:], fails, grader="fails")
    )
    flags = {"n_samples_per_prompt": 4, "rewards_normalization": True, "reward_key": key}
    batch = train_data(group, **flags)
    assert batch.rewards == [0.0] * 4 and batch.graded == [True, True, True, False]
    assert list(batch.loss_masks) == [[1], [1], [1], [0]]
    group[0].reward = 0.0 if key is None else {key: 0.0}
    assert train_data(group, **flags).rewards == train_data(group[:3], **flags).rewards + [0.0]
    assert train_data(group[:3], **flags).graded is None


def test_tokens_are_ids():
    with pytest.raises(DataError, match=r"sample 0 has \['a', 'b', 'c'\] in tokens; these must be numbers"):
        split([sample(tokens=["a", "b", "c"])])


@pytest.mark.parametrize("task", ["poetry", ["math"], None])
def test_a_sample_that_names_none_of_the_allowed_is_refused_with_its_index(task):
    entry = "task", ("math", "code"), "--opd-teachers"
    good = sample(index=1, metadata={"task": "code"})
    assert train_data([good], named_columns={"names": entry}).extra["names"] == ["code"]
    with pytest.raises(DataError, match=r"sample 7 has the metadata\['task'\] .*; --opd-teachers has math, code"):
        train_data([good, sample(index=7, metadata={"task": task})], named_columns={"names": entry})


def names_poetry(args, samples):
    return documented_columns(args, samples) | {"names": ["math", "poetry"][: len(samples)]}


def test_names_that_a_converter_makes_are_refused_before_training():
    entry = "task", ("math", "code"), "--opd-teachers"
    flags = {"named_columns": {"names": entry}, "custom_convert_samples_to_train_data_path": path(names_poetry)}
    assert train_data([sample()], **flags).extra["names"] == ["math"]
    with pytest.raises(DataError, match="sample 1 .* has 'poetry' in names; --opd-teachers has math, code; .*convert"):
        train_data([sample(), sample(index=1)], **flags)
    flags["custom_convert_samples_to_train_data_path"] = path(documented_columns)
    assert "names" not in train_data([sample()], **flags).extra
