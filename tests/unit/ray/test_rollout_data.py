"""A plug-in that returns the wrong shape is named with its flag, before the train data are split."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from slime.ray.rollout_data import train_data_from_samples
from slime.utils.errors import DataError, HookError
from slime.utils.types import Sample


def sample(**fields: Any) -> Sample:
    values = {"index": 0, "tokens": [1, 2, 3], "response_length": 1, "reward": 1.0, "status": Sample.Status.COMPLETED}
    return Sample(**values | fields)


def train_data(samples: list[Sample], **flags: Any) -> dict[str, Any]:
    args = Namespace(
        custom_convert_samples_to_train_data_path=None,
        custom_reward_post_process_path=None,
        n_samples_per_prompt=1,
        rollout_batch_size=1,
        advantage_estimator="grpo",
        rewards_normalization=False,
        grpo_std_normalization=True,
        reward_key=None,
        use_rollout_routing_replay=False,
        rollout_top_p=1.0,
        use_opd=False,
    )
    return train_data_from_samples(Namespace(**vars(args) | flags), samples)


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


@pytest.mark.parametrize("reward", [None, "good", float("nan"), {"score": 1}, [1.0]])
def test_a_reward_that_is_no_number_is_shown(reward):
    with pytest.raises(DataError, match=r"reward of sample 0 .* --reward-key, .* --custom-rm-path"):
        train_data([sample(reward=reward)])


def test_tokens_are_ids():
    with pytest.raises(DataError, match="sample 0 has the token 'c'; tokens are whole numbers"):
        train_data([sample(tokens=["a", "b", "c"])])
