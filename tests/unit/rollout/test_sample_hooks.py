"""Hooks on samples, and the results that a rollout function may return."""

import asyncio
from argparse import Namespace

import pytest

from slime.rollout import sample_hooks
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from slime.utils.errors import HookError
from slime.utils.types import Sample


@pytest.fixture
def hooks(monkeypatch):
    known = {}
    monkeypatch.setattr(sample_hooks, "load_function", known.__getitem__)
    yield known
    sample_hooks.set_current_rollout_id(None)


def apply(paths, value, **facts):
    args = Namespace(rollout_sample_hook_path=paths)
    return asyncio.run(sample_hooks.apply_rollout_sample_hooks(args, value, **facts))


def test_hooks_run_in_order_and_get_the_facts_they_ask_for(hooks):
    def plain(args, sample):
        sample.response += "a"

    async def replaces(args, sample, *, rollout_id=None, evaluation=False):
        return Sample(response=f"{sample.response} {rollout_id} {evaluation}")

    def takes_all(args, sample, **facts):
        sample.metadata.update(facts)

    hooks.update(plain=plain, replaces=replaces, takes_all=takes_all)
    sample_hooks.set_current_rollout_id(3)
    result = apply(["plain", "replaces", "takes_all"], Sample(), evaluation=True)
    assert result.response == "a 3 True"
    assert result.metadata == {"rollout_id": 3, "evaluation": True}


def test_hooks_see_every_leaf_of_a_fan_out(hooks):
    def mark(args, sample):
        return Sample(index=sample.index + 10)

    hooks["mark"] = mark
    nested = apply(["mark"], [Sample(index=0), [Sample(index=1)]])
    assert (nested[0].index, nested[1][0].index) == (10, 11)


def test_a_hook_that_returns_something_else_is_named(hooks):
    hooks["my.hook"] = lambda args, sample: [sample]
    with pytest.raises(
        HookError, match="--rollout-sample-hook-path my.hook returned list; a sample hook must return a Sample or None"
    ):
        apply(["my.hook"], Sample())


def test_a_rollout_function_may_return_outputs_or_bare_values():
    train = RolloutFnTrainOutput([[Sample()]], {"m": 1})
    assert call_rollout_fn(lambda *a, evaluation: train, 1, 2, evaluation=False) is train
    groups = [[Sample()]]
    assert call_rollout_fn(lambda *a, evaluation: groups, evaluation=False) == RolloutFnTrainOutput(groups)
    data = {"a": {"rewards": [1]}}
    assert call_rollout_fn(lambda *a, evaluation: data, evaluation=True) == RolloutFnEvalOutput(data)


@pytest.mark.parametrize("evaluation", [True, False])
def test_a_rollout_function_that_returns_nothing_is_named(evaluation):
    def forgets(args, *, evaluation):
        pass

    with pytest.raises(HookError, match="forgets returned NoneType with evaluation"):
        call_rollout_fn(forgets, None, evaluation=evaluation)
