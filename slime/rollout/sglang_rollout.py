"""The default rollout: sample groups of answers from SGLang engines until enough of them are kept.

    while kept < --rollout-batch-size:
        top up to the target with a wave of --over-sampling-batch-size groups
        wait for any group; the pool keeps, drops or continues it
    abort what is left; with --partial-rollout it goes back to the data source

The steps are public, and plug-ins may replace them here: ``generate`` (one request), ``generate_and_rm`` (one
execution and its reward), ``generate_and_rm_group`` (one prompt), ``GenerateState`` and ``load_function``.  The
modules that implement them get this one in their context (``RolloutContext.entry_points``) and look names up in it at
every call.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any, cast

from slime.rollout.base_types import Entry, Group, RolloutFnEvalOutput, RolloutFnTrainOutput, is_finished
from slime.rollout.config import RolloutConfig, rollout_config
from slime.rollout.context import begin_rollout, context_of
from slime.rollout.control_client import abort_engines, engine_loads
from slime.rollout.eval_config import EvalDatasetConfig
from slime.rollout.eval_rollout import evaluate_all, evaluate_dataset
from slime.rollout.generate import _prepare_prompt_ids, answer_sample
from slime.rollout.generate_group import run_execution, run_group
from slime.rollout.pool import GroupPool, result_of, stamp_start
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.state import RequestState
from slime.rollout.waiting import LongWait, deadline_error
from slime.utils.async_utils import run
from slime.utils.errors import ProcessError
from slime.utils.misc import load_function
from slime.utils.net import http_url
from slime.utils.types import Sample

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

FIRST_REPEAT_S = 0.1
MAX_REPEAT_S = 3.0
IDLE_WAIT_S = 60.0
"""Time that engines may stay busy after the last request has returned, before the rollout continues."""

GetSamples = Callable[[int], list[Group]]

_THIS: Any = sys.modules[__name__]


# Names that plug-ins call and replace


class GenerateState(RequestState):
    """State that all requests of a process share; the arguments of the first construction count."""

    def submit_generate_tasks(self, groups: Iterable[Group]) -> None:
        """Start one task for each group, with its own copy of the sampling parameters."""
        for group in groups:
            params = self.sampling_params.copy()
            self.start_group(generate_and_rm_group(self.args, group, sampling_params=params, evaluation=False))
            self.remaining_batch_size += 1


def get_model_url(args: Namespace, model_name: str, endpoint: str = "/generate") -> str:
    """Return the URL of ``endpoint`` at the router of one served model; the default router when the name has none."""
    config = rollout_config(args)
    default = config.sglang_router_ip, config.sglang_router_port
    ip, port = (config.sglang_model_routers or {}).get(model_name, default)
    return f"{http_url(ip, port)}{endpoint}"


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Fill ``sample`` with one answer of the engine: tokens, log-probs, text, status.

    Returns the same object.  Its status ends as COMPLETED (stop), TRUNCATED (length) or ABORTED (stopped by us).

    Raises:
        EngineError: no engine answered, after the retries of the HTTP client, or the answer is not usable.
    """
    return await answer_sample(context_of(args, _THIS), sample, sampling_params)


async def generate_and_rm(
    args: Namespace, sample: Entry, sampling_params: dict[str, Any], evaluation: bool = False
) -> Entry:
    """Run one execution with its reward: a Sample, or the list of Samples that a custom generate function made of it.

    An entry that is answered already is not generated again; an aborted one comes back without a reward.  With
    ``--group-rm`` rewards are left to ``generate_and_rm_group``.
    """
    return await run_execution(context_of(args, _THIS), sample, sampling_params, evaluation=evaluation)


async def generate_and_rm_group(
    args: Namespace, group: Group, sampling_params: dict[str, Any], evaluation: bool = False
) -> Group:
    """Run all executions of one prompt at once; they are rewarded together with ``--group-rm``.

    A group whose samples are all finished (kept surplus of an earlier rollout) sends no request and keeps its masks.
    When the rollout is aborted, unfinished samples are returned as they are.
    """
    return await run_group(context_of(args, _THIS), group, sampling_params, evaluation=evaluation)


async def eval_rollout(args: Namespace, rollout_id: int) -> RolloutFnEvalOutput:
    """Evaluate all of ``args.eval_datasets`` at once.

    Returns:
        ``data[name] = {"rewards": [...], "truncated": [...], "samples": [...]}``, in the order of the prompts.

    Raises:
        ConfigError: ``--group-rm`` is set, which has no meaning for single answers.
        EngineError: no engine answered.
        DeadlineError: ``--rollout-timeout-s`` passed.
    """
    return await evaluate_all(begin_rollout(args, _THIS), rollout_id)


async def eval_rollout_single_dataset(
    args: Namespace, rollout_id: int, dataset_cfg: EvalDatasetConfig
) -> dict[str, dict[str, list[Any]]]:
    """Evaluate one data set: ``{name: {"rewards", "truncated", "samples"}}``."""
    return await evaluate_dataset(context_of(args, _THIS), rollout_id, dataset_cfg)


# The rollout


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Run one rollout, or one evaluation; the default ``--rollout-function-path`` and ``--eval-function-path``.

    Groups to go on with in a later rollout are given back to ``data_source.add_samples``.
    """
    # The coroutines keep --rollout-timeout-s themselves, and know better what to say when it has passed.
    timeout_s = rollout_config(args).rollout_timeout_s + 2 * IDLE_WAIT_S
    if evaluation:
        return run(eval_rollout(args, rollout_id), timeout_s)
    output, returned = run(generate_rollout_async(args, rollout_id, data_source.get_samples), timeout_s)
    if returned:
        data_source.add_samples(returned)
    return output


async def generate_rollout_async(
    args: Namespace, rollout_id: int, get_samples: GetSamples
) -> tuple[RolloutFnTrainOutput, list[Group]]:
    """Run one rollout.

    Returns:
        The kept groups sorted by their first sample's ``index``, with metrics; and the groups to give back to the data
        source: with ``--partial-rollout`` finished surplus first, then the interrupted ones; otherwise none.

    Raises:
        EngineError: no engine answered.
        DeadlineError: ``--rollout-timeout-s`` passed.
        DataError: the data source has nothing to give, or gives groups of the wrong size.
    """
    context = begin_rollout(args, _THIS)
    config = context.config
    pool = GroupPool(context, rollout_id=rollout_id)
    wait = LongWait(f"rollout {rollout_id}", config.rollout_batch_size, timeout_s=config.rollout_timeout_s)
    try:
        if config.max_staleness is not None:
            await pool.bound.clock.refresh(rollout_id)
        while len(pool.kept) < config.rollout_batch_size:
            await _top_up(pool, get_samples)
            await pool.next_finished(wait, f"{pool.policy.counts['dropped']} dropped by the filter")
            pool.apply_staleness()
        interrupted = await abort(args, rollout_id, timeout_s=max(wait.remaining_s, IDLE_WAIT_S))
    finally:
        wait.close()
        await pool.close()
        pool.state.reset()

    batch, metrics = pool.take_batch(get_samples)
    surplus = pool.take(len(pool.kept)) if config.partial_rollout else []
    for group in surplus:
        stamp_start(group, rollout_id)
    metrics |= _count_left_over(metrics, surplus, interrupted)
    return RolloutFnTrainOutput(samples=cast(Any, batch), metrics=metrics), surplus + interrupted


async def _top_up(pool: GroupPool, get_samples: GetSamples) -> None:
    """Submit waves of groups until those in flight and those kept reach the target."""
    while pool.num_outstanding < pool.config.rollout_batch_size:
        groups = get_samples(pool.config.over_sampling_batch_size)
        if not groups:
            raise pool.no_groups_error()
        pool.admit(groups)
        await pool.submit(groups)


def _count_left_over(metrics: dict[str, float], surplus: list[Group], interrupted: list[Group]) -> dict[str, float]:
    """Split the groups that were neither kept nor dropped: returned to the data source, or discarded."""
    left_over = metrics["rollout/groups/issued"] - metrics["rollout/groups/kept"] - metrics["rollout/groups/dropped"]
    num_returned = len(surplus) + len(interrupted)
    num_unfinished = sum(not is_finished(group) for group in interrupted)
    return {
        "rollout/groups/returned": num_returned,
        "rollout/groups/returned_unfinished": num_unfinished,
        "rollout/groups/returned_finished": num_returned - num_unfinished,
        "rollout/groups/discarded": left_over - num_returned,
    }


# Ending it early


async def abort(args: Namespace, rollout_id: int, *, timeout_s: float | None = None) -> list[Group]:
    """Stop every pending group of the rollout and wait until all of them have come back.

    A request may still be on its way when the first abort arrives, so the abort is repeated until nothing is pending.

    Returns:
        With ``--partial-rollout`` the groups in submission order, unfinished and just finished ones alike, their
        samples stamped with ``metadata["start_rollout_id"]``; otherwise nothing.

    Raises:
        DeadlineError: something was still pending after ``timeout_s`` (``--rollout-timeout-s`` by default).
        HookError: a group was cancelled by a custom function.
    """
    context = context_of(args, _THIS)
    config, state = context.config, context.state()
    state.aborted = True
    tasks = state.pending_in_order()
    timeout_s = config.rollout_timeout_s if timeout_s is None else timeout_s
    wait = LongWait(f"rollout {rollout_id}: abort", len(tasks), timeout_s=timeout_s)
    repeat_s = FIRST_REPEAT_S
    try:
        while True:
            await abort_engines(config)
            pending = {task for task in tasks if not task.done()}
            if not pending:
                break
            _, pending = await asyncio.wait(pending, timeout=min(repeat_s, wait.remaining_s))
            num_done = len(tasks) - len(pending)
            wait.show(num_done, "groups back")
            if pending and wait.remaining_s <= 0:
                what, left = f"The abort of rollout {rollout_id}", f"{len(pending)} groups pending"
                raise await deadline_error(config, what, wait, num_done=num_done, pending=left)
            repeat_s = min(2 * repeat_s, MAX_REPEAT_S)
        groups = [result_of(task, "A group") for task in tasks]
        await _wait_until_idle(config, repeat_s=repeat_s)
    finally:
        wait.close()
    state.pendings.difference_update(tasks)
    if not config.partial_rollout:
        return []
    for group in groups:
        stamp_start(group, rollout_id)
    return groups


async def _wait_until_idle(config: RolloutConfig, *, repeat_s: float) -> None:
    """Repeat the abort until the engines are idle: requests of custom functions may have outlived their callers."""
    deadline_s = time.monotonic() + IDLE_WAIT_S
    while busy := await _find_busy(config):
        if time.monotonic() > deadline_s:
            logger.warning("Engines still busy %.0f s after the abort (requests by engine): %s", IDLE_WAIT_S, busy)
            return
        await asyncio.sleep(repeat_s)
        repeat_s = min(2 * repeat_s, MAX_REPEAT_S)
        await abort_engines(config)


async def _find_busy(config: RolloutConfig) -> dict[str, int | None]:
    """Return the engines that hold requests; the router in their place while it does not name them."""
    try:
        return {url: load for url, load in (await engine_loads(config)).items() if load}
    except ProcessError:  # it is being started again, or its end will end the run
        return {config.router_url: None}
