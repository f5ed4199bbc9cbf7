"""Recorded samples used beside running engines."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime.observability.dumps import save_rollout_dump
from slime.rollout.forge_load import generate_rollout
from slime.utils.errors import ConfigError
from slime.utils.types import Sample


def samples(*group_indices: int | None, reward: float = 1.0) -> list[Sample]:
    return [
        Sample(index=k, group_index=group, tokens=[1, 2], response_length=1, reward=reward, status=status)
        for k, group in enumerate(group_indices)
        for status in [Sample.Status.TRUNCATED if k == 0 else Sample.Status.COMPLETED]
    ]


def arguments(template: str | None) -> Namespace:
    return Namespace(load_forge_rollout_data=template, reward_key=None, eval_reward_key=None, trust_debug_data=False)


def test_each_rollout_gets_its_file_and_later_ones_the_first(tmp_path):
    template = str(tmp_path / "{rollout_id}.pt")
    save_rollout_dump(template, 0, samples(0, 0, 1, 1))
    save_rollout_dump(template, 1, samples(2, 2))
    args = arguments(template)
    assert [[s.group_index for s in group] for group in generate_rollout(args, 0, None).samples] == [[0, 0], [1, 1]]
    assert [[s.group_index for s in group] for group in generate_rollout(args, 1, None).samples] == [[2, 2]]
    assert generate_rollout(args, 7, None).samples == generate_rollout(args, 0, None).samples


def test_an_evaluation_is_reported_under_one_name(tmp_path):
    template = str(tmp_path / "{rollout_id}.pt")
    save_rollout_dump(template, 0, samples(0, 0))
    save_rollout_dump(template, 3, samples(0, 0, 1, reward=0.5), evaluation=True)
    args = arguments(template)
    result = generate_rollout(args, 3, None, evaluation=True).data
    assert list(result) == ["forge_eval"]
    assert result["forge_eval"]["rewards"] == [0.5, 0.5, 0.5]
    assert result["forge_eval"]["truncated"] == [True, False, False]
    assert generate_rollout(args, 8, None, evaluation=True).data["forge_eval"]["rewards"] == [1.0, 1.0]


def test_a_reward_without_the_entry_of_the_flag_is_named(tmp_path):
    path = str(tmp_path / "data.pt")
    save_rollout_dump(path, 0, samples(0, reward={"acc": 1.0}))
    args = arguments(path)
    args.reward_key = "score"
    with pytest.raises(ConfigError, match="forge_eval has no entry 'score'; it has acc.*--eval-reward-key"):
        generate_rollout(args, 0, None, evaluation=True)
