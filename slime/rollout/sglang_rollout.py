"""The default rollout: sample groups of answers from SGLang engines until enough of them pass the filter.

    while kept < --rollout-batch-size:
        top up to the target with a wave of --over-sampling-batch-size groups
        wait for any group; ask the dynamic filter; keep or drop
    abort what is left; with --partial-rollout it goes back to the data source

The steps below are public, and plug-ins may replace them here: ``generate`` (one request), ``generate_and_rm`` (one
execution and its reward), ``generate_and_rm_group`` (one prompt), ``GenerateState`` and ``load_function``.  They are
implemented in the neighbouring modules and looked up in this one.
"""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from slime.rollout.abort import IDLE_WAIT_S, abort, count_unfinished, stamp_start, timeout_error
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.collector import GroupCollector
from slime.rollout.eval_rollout import eval_rollout, eval_rollout_single_dataset
from slime.rollout.generate import _prepare_prompt_ids, generate, get_model_url
from slime.rollout.generate_group import generate_and_rm, generate_and_rm_group
from slime.rollout.groups import Group, first_index
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.state import GenerateState
from slime.rollout.waiting import DEFAULT_ROLLOUT_TIMEOUT_S, DeadlineExceeded, LongWait, cancel_all
from slime.utils.async_utils import run
from slime.utils.errors import DataError
from slime.utils.misc import load_function

__all__ = [
    "GenerateState",
    "_prepare_prompt_ids",
    "abort",
    "async_rm",
    "batched_async_rm",
    "eval_rollout",
    "eval_rollout_single_dataset",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "get_model_url",
    "load_function",
]

logger = logging.getLogger(__name__)

STARTED_AT_ONCE = 64
"""Samples whose requests are prepared before the event loop looks at other work; 10 to 20 ms."""

GetSamples = Callable[[int], list[Group]]


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The default ``--rollout-function-path`` and ``--eval-function-path``.

    Groups to go on with in a later rollout are given back to ``data_source.add_samples``.
    """
    # The coroutines keep --rollout-timeout-s themselves, and know better what to say when it has passed.
    timeout_s = getattr(args, "rollout_timeout_s", DEFAULT_ROLLOUT_TIMEOUT_S) + 2 * IDLE_WAIT_S
    if evaluation:
        return run(eval_rollout(args, rollout_id), timeout_s)
    output, returned = run(generate_rollout_async(args, rollout_id, data_source.get_samples), timeout_s)
    if returned:
        data_source.add_samples(returned)
    return output


async def generate_rollout_async(
    args: Namespace, rollout_id: int, get_samples: GetSamples
) -> tuple[RolloutFnTrainOutput, list[Group]]:
    """One rollout.

    Returns:
        The kept groups sorted by their first sample's ``index``, with metrics; and the groups to give back to the data
        source: with ``--partial-rollout`` finished surplus first, then the interrupted ones; otherwise none.

    Raises:
        EngineError: no engine answered.
        DeadlineError: ``--rollout-timeout-s`` passed.
        DataError: the data source has nothing to give, or gives groups of the wrong size.
    """
    state = GenerateState(args)
    target = args.rollout_batch_size
    collector = GroupCollector(args, target, rollout_id=rollout_id)
    wait = LongWait(
        f"rollout {rollout_id}", target, timeout_s=getattr(args, "rollout_timeout_s", DEFAULT_ROLLOUT_TIMEOUT_S)
    )
    try:
        await collector.begin()
        while not collector.is_full:
            await _top_up(args, state, collector, get_samples)
            done = await wait.next_finished(state.finished, lambda: (len(collector.kept), collector.detail(state)))
            for task in state.in_submission_order(done):
                state.pendings.discard(task)
                collector.add(state, task.result())
        interrupted = await abort(args, rollout_id, timeout_s=max(wait.remaining_s, IDLE_WAIT_S))
    except DeadlineExceeded:
        raise await timeout_error(args, f"Rollout {rollout_id}", wait, len(collector.kept), target) from None
    finally:
        wait.close()
        await cancel_all(state.pendings)
        state.reset()

    kept: list[Any] = sorted(collector.kept, key=first_index)
    returned = _groups_to_return(args, rollout_id, collector, interrupted)
    _call_end_hooks(args, kept, sorted(collector.seen, key=first_index), get_samples)
    return RolloutFnTrainOutput(samples=kept, metrics=collector.metrics()), returned


async def _top_up(args: Namespace, state: GenerateState, collector: GroupCollector, get_samples: GetSamples) -> None:
    """Submit waves of groups until those in flight and those kept reach the target.

    The groups of a wave start a few at a time, so that answers that arrive meanwhile need not wait for all of them.
    """
    at_once = max(1, STARTED_AT_ONCE // args.n_samples_per_prompt)
    while state.remaining_batch_size < collector.target:
        groups = get_samples(args.over_sampling_batch_size)
        if not groups:
            raise DataError(
                f"The data source gave no groups when asked for {args.over_sampling_batch_size}; the rollout has "
                f"{state.remaining_batch_size} of {collector.target}. Check --prompt-data and --buffer-filter-path."
            )
        collector.issued(groups)
        for begin in range(0, len(groups), at_once):
            state.submit_generate_tasks(groups[begin : begin + at_once])
            await asyncio.sleep(0)


def _groups_to_return(
    args: Namespace, rollout_id: int, collector: GroupCollector, interrupted: list[Group]
) -> list[Group]:
    """What the data source gets back, counted; the surplus finished before the abort is part of it."""
    surplus = collector.surplus if args.partial_rollout else []
    for group in surplus:
        stamp_start(group, rollout_id)
    collector.returned(surplus + interrupted, num_unfinished=count_unfinished(interrupted))
    return surplus + interrupted


def _call_end_hooks(args: Namespace, kept: list[Group], seen: list[Group], get_samples: GetSamples) -> None:
    """The two hooks that see the whole rollout."""
    if path := getattr(args, "rollout_sample_filter_path", None):
        load_function(path)(args, kept)
    if path := getattr(args, "rollout_all_samples_process_path", None):
        load_function(path)(args, seen, get_samples)
