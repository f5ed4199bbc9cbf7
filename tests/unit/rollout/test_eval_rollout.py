"""Evaluation against the fake cluster: every prompt is answered, graded and reported in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.flags.evaluation import EvalDatasetConfig
from slime.rollout import eval_data
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.async_utils import run
from slime.utils.errors import ConfigError, DeadlineError, EngineError
from slime.utils.http_utils import close_http_client
from tests.unit.rollout import fake_cluster
from tests.unit.rollout.fake_cluster import FakeCluster, Plan, clear_process, make_args, prompt_of, write_prompts

HOOKS = fake_cluster.__name__


@pytest.fixture
def cluster(monkeypatch) -> Iterator[FakeCluster]:
    clear_process(monkeypatch)
    monkeypatch.setattr(eval_data, "_datasets", {})

    async def make() -> FakeCluster:
        return await FakeCluster().start()

    started = run(make())
    yield started
    run(close_http_client())
    run(started.stop())


def evaluate(cluster: FakeCluster, *datasets: EvalDatasetConfig, **flags: Any) -> dict[str, Any]:
    args = make_args(cluster.port, eval_datasets=list(datasets), **flags)
    return generate_rollout(args, 0, None, evaluation=True).data


def dataset(folder: Path, name: str, prompts: list[str], **fields: Any) -> EvalDatasetConfig:
    path = write_prompts(folder / f"{name}.jsonl", prompts)
    defaults = {"temperature": 0.6, "top_p": 0.7, "top_k": 5, "max_response_len": 8}
    defaults |= {"custom_rm_path": f"{HOOKS}.position_reward"}
    return EvalDatasetConfig(name=name, path=path, input_key="prompt", label_key="label", **(defaults | fields))


def test_each_data_set_has_rewards_truncations_and_samples_in_prompt_order(cluster, tmp_path):
    cluster.plans["b"] = Plan(length=100)
    data = evaluate(
        cluster,
        dataset(tmp_path, "first", ["a", "b"], n_samples_per_eval_prompt=2),
        dataset(tmp_path, "second", ["dull"]),
    )
    assert data["first"]["rewards"] == [0.0, 1.0, 0.0, 1.0]
    assert data["first"]["truncated"] == [False, False, True, True]
    assert [(s.index, s.prompt) for s in data["first"]["samples"]] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    assert data["second"]["rewards"] == [1.0]
    assert len(cluster.requests) == 5 and cluster.num_aborts == 0


def test_the_data_set_has_its_own_sampling_parameters(cluster, tmp_path):
    evaluate(cluster, dataset(tmp_path, "d", ["a"], min_new_tokens=2, repetition_penalty=1.1, stop=["!"]))
    assert cluster.requests[0]["sampling_params"] == {
        "temperature": 0.6,
        "top_p": 0.7,
        "top_k": 5,
        "max_new_tokens": 8,
        "stop": ["!"],
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "repetition_penalty": 1.1,
        "min_new_tokens": 2,
    }
    assert cluster.through_router == [True], "evaluation asks for no replay fields, whatever its top-p"


def test_answers_to_one_prompt_have_different_seeds_when_deterministic(cluster, tmp_path):
    config = dataset(tmp_path, "d", ["a", "b"], n_samples_per_eval_prompt=2)
    evaluate(cluster, config, sglang_enable_deterministic_inference=True)
    seeds = Counter((prompt_of(b), b["sampling_params"]["sampling_seed"]) for b in cluster.requests)
    assert seeds == {("a", 42): 1, ("a", 43): 1, ("b", 42): 1, ("b", 43): 1}


def test_metadata_overrides_and_grader_of_the_data_set_reach_the_samples(cluster, tmp_path):
    config = dataset(tmp_path, "d", ["dull"], custom_rm_path=None, rm_type="f1", metadata_overrides={"k": 1})
    for of_run in (None, f"{HOOKS}.position_reward"):
        data = evaluate(cluster, config, custom_rm_path=of_run, rm_type="math")
        assert data["d"]["samples"][0].metadata == {"k": 1, "rm_type": "f1"}
        assert data["d"]["rewards"] == [0.0]  # the run's function would give 1


def test_group_rm_is_refused(cluster, tmp_path):
    with pytest.raises(ConfigError, match="--group-rm"):
        evaluate(cluster, dataset(tmp_path, "d", ["a"]), group_rm=True)


def test_an_answer_that_the_engine_breaks_off_is_continued_and_given_up_at_last(cluster, tmp_path):
    cluster.plans["a"] = Plan(breaks=1)
    data = evaluate(cluster, dataset(tmp_path, "d", ["a"]))
    assert data["d"]["samples"][0].response_length == 4
    cluster.plans["a"] = Plan(breaks=1000, length=100)
    with pytest.raises(EngineError, match="aborted 3 times"):
        evaluate(cluster, dataset(tmp_path, "d", ["a"], max_response_len=100))


def test_the_deadline_ends_an_evaluation(cluster, tmp_path):
    cluster.plans["a"] = Plan(hold_after=1)
    with pytest.raises(DeadlineError, match=r"evaluation of d .* 0 of 1 are done"):
        evaluate(cluster, dataset(tmp_path, "d", ["a"]), rollout_timeout_s=0.3)


def test_answers_to_one_prompt_are_one_group_in_every_data_set(cluster, tmp_path):
    data = evaluate(
        cluster,
        dataset(tmp_path, "first", ["a", "b"], n_samples_per_eval_prompt=2),
        dataset(tmp_path, "second", ["c", "d", "e"]),
    )
    assert [sample.group_index for sample in data["first"]["samples"]] == [0, 0, 1, 1]
    assert [sample.group_index for sample in data["second"]["samples"]] == [0, 1, 2]
    assert [sample.index for sample in data["first"]["samples"]] == [0, 1, 2, 3]
