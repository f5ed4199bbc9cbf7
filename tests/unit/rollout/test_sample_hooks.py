"""Hooks on samples, and what a rollout function may return."""

import asyncio
from argparse import Namespace

import pytest

from slime.rollout import sample_hooks
from slime.rollout.base_types import call_rollout_fn
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


def test_a_hook_that_returns_something_else_is_named(hooks):
    hooks["my.hook"] = lambda args, sample: [sample]
    with pytest.raises(
        HookError, match="--rollout-sample-hook-path my.hook returned list; a sample hook must return a Sample or None"
    ):
        apply(["my.hook"], Sample())


@pytest.mark.parametrize("evaluation", [True, False])
def test_a_rollout_function_that_returns_nothing_is_named(evaluation):
    def forgets(args, *, evaluation):
        pass

    with pytest.raises(HookError, match="forgets returned NoneType with evaluation"):
        call_rollout_fn(forgets, None, evaluation=evaluation)
