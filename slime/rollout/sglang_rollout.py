"""The default rollout: generates groups of responses with SGLang engines until enough are kept.

    while kept < --rollout-batch-size:
        top up to the target with a wave of --over-sampling-batch-size groups
        wait for any group; the pool keeps, drops or continues it
    abort the other groups; with --partial-rollout they go back to the data source

In reading order: the state shared by requests, one request (``generate``), one execution and its reward
(``generate_and_rm``), one prompt (``generate_and_rm_group``), the rollout, its abort, and the evaluation.  Plug-ins
import these names and may replace them in this module: every call looks them up here.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
import uuid
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from slime.flags.evaluation import EvalDatasetConfig
from slime.flags.reward import RewardConfig
from slime.flags.security import Trust
from slime.observability.trace_utils import build_sglang_meta_trace_attrs, trace_next_attempt, trace_span
from slime.rollout.base_types import (
    Entry,
    Group,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    check_samples,
    is_finished,
    leaf_samples,
)
from slime.rollout.config import RolloutConfig
from slime.rollout.engine_client import abort_engines, engine_loads
from slime.rollout.engine_request import (
    _prepare_prompt_ids,
    append_checked,
    ask,
    decoder_of,
    request_payload,
    training_sampling_params,
)
from slime.rollout.eval_data import load_dataset, requests_of, results_of
from slime.rollout.pool import GroupPool, result_of, stamp_start
from slime.rollout.prompts import encode
from slime.rollout.rm_hub import TOKENIZERS, asks_for_lists, async_rm, batched_async_rm
from slime.rollout.rm_hub.policy import is_one_each, leave_out
from slime.rollout.run_state import current_run
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.rollout.waiting import LongWait, cancel_all, deadline_error, wait_for_all
from slime.utils.async_utils import run, tune_garbage_collection
from slime.utils.errors import ConfigError, EngineError, HookError, ProcessError
from slime.utils.http_utils import get_rollout_num_engines
from slime.utils.misc import SingletonMeta, copy_plain, load_function, parameters_of
from slime.utils.net import http_url
from slime.utils.plugins import PluginCall, await_plugin
from slime.utils.processing_utils import check_image_tokens, load_processor, load_tokenizer
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
"""Seconds that engines may stay busy after the last request has returned before the rollout continues anyway."""
MAX_EVAL_ATTEMPTS = 3
"""Attempts to generate an evaluation sample that engines keep aborting on their own."""
PROMPTS_KEPT = 16
"""Number of tokenized prompts to cache."""

GetSamples = Callable[[int], list[Group]]


# The state shared by requests


class GenerateState(metaclass=SingletonMeta):
    """Process-wide state shared by all requests.  A singleton: arguments of later constructions are ignored."""

    def __init__(self, args: Namespace) -> None:
        config = RolloutConfig.of(args)
        self.args = args
        self.tokenizer = load_tokenizer(config.hf_checkpoint, trust_remote_code=Trust.of(args).trust_remote_code)
        TOKENIZERS[config.hf_checkpoint] = self.tokenizer
        self.processor = load_processor(config.hf_checkpoint, trust_remote_code=Trust.of(args).trust_remote_code)
        num_requests = args.sglang_server_concurrency * get_rollout_num_engines(args)
        self.semaphore = asyncio.Semaphore(num_requests)
        self.sampling_params = training_sampling_params(config)
        self.group_sampling_seeds: list[int] | None = None
        if config.sglang_enable_deterministic_inference:
            self.group_sampling_seeds = [config.rollout_seed + i for i in range(config.n_samples_per_prompt)]
        self.dp_counts = [0] * (config.sglang_dp_size or 1)
        self.dp_rank = 0
        self._prompt_ids: OrderedDict[str, list[int]] = OrderedDict()
        self.reset()
        tune_garbage_collection(num_requests)

    def reset(self) -> None:
        """Clear the state of the rollout that has just ended."""
        self.remaining_batch_size = 0
        """Number of groups of the current rollout that are in flight or kept."""
        self.pendings: set[asyncio.Task[Group]] = set()
        self.aborted = False
        self._num_started = 0

    def prompt_ids(self, prompt: str) -> list[int]:
        """Return a prompt's token ids; do not modify them.  Recent prompts are cached for their siblings."""
        ids = self._prompt_ids.get(prompt)
        if ids is None:
            ids = self._prompt_ids[prompt] = encode(self.tokenizer, prompt)
            if len(self._prompt_ids) > PROMPTS_KEPT:
                self._prompt_ids.popitem(last=False)
        return ids

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """Assign one request to the data-parallel rank with the fewest requests; also sets ``dp_rank``."""
        rank = min(range(len(self.dp_counts)), key=self.dp_counts.__getitem__)
        self.dp_counts[rank] += 1
        self.dp_rank = rank
        try:
            yield rank
        finally:
            self.dp_counts[rank] -= 1

    def submit_generate_tasks(self, groups: Iterable[Group]) -> None:
        """Start one task for each group, with its own copy of the sampling parameters."""
        for group in groups:
            params = self.sampling_params.copy()
            self.start_group(generate_and_rm_group(self.args, group, sampling_params=params, evaluation=False))
            self.remaining_batch_size += 1

    def start_group(self, call: Coroutine[Any, Any, Group]) -> asyncio.Task[Group]:
        """Start the task of a group."""
        self._num_started += 1
        task = asyncio.get_running_loop().create_task(call, name=f"group {self._num_started:012}")
        self.pendings.add(task)
        return task

    def pending_in_order(self) -> list[asyncio.Task[Group]]:
        """Return the pending tasks in the order in which they were started."""
        return sorted(self.pendings, key=lambda task: task.get_name())


# One request


def get_model_url(args: Namespace, model_name: str, endpoint: str = "/generate") -> str:
    """Return the URL of ``endpoint`` at the router of a served model, or at the default router for unknown names."""
    config = RolloutConfig.of(args)
    default = config.sglang_router_ip, config.sglang_router_port
    ip, port = (config.sglang_model_routers or {}).get(model_name, default)
    return f"{http_url(ip, port)}{endpoint}"


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate one response and append its tokens, log-probs, text and status to ``sample``.

    Returns:
        The same object, with status COMPLETED (stop), TRUNCATED (length) or ABORTED.

    Raises:
        EngineError: no engine answered after all retries, or the answer is unusable.
        DataError: the sample is neither pending nor aborted, or its prompt cannot be sent.
    """
    config, state = RolloutConfig.of(args), GenerateState(args)
    payload = request_payload(config, sample, sampling_params, state)
    if payload is None:
        return sample
    try:
        with trace_span(sample, "sglang_generate") as span:
            output = await ask(config, sample, payload, is_over=lambda: state.aborted)
            span.update(build_sglang_meta_trace_attrs(output["meta_info"]))
    except ProcessError:
        if not state.aborted:
            raise
        # The rollout is over and does not need this answer; the sample's earlier tokens stay valid.
        logger.warning("Sample %s lost its engine during the abort; it keeps its earlier tokens.", sample.index)
        sample.status = Sample.Status.ABORTED
        return sample
    check_image_tokens(f"Sample {sample.index}", payload, output["meta_info"], len(sample.tokens))
    append_checked(args, sample, output, decoder_of(state, payload))
    return sample


# One execution and its reward


async def generate_and_rm(
    args: Namespace, sample: Entry, sampling_params: dict[str, Any], evaluation: bool = False
) -> Entry:
    """Generate and reward one execution.

    An entry that is already finished is not generated again, and an aborted one is returned without a reward.  With
    ``--group-rm``, ``generate_and_rm_group`` computes the rewards instead.

    Returns:
        A Sample, or the list of Samples that a custom generate function returned.
    """
    config = RolloutConfig.of(args)
    mask_earlier_tokens(config, sample)
    if isinstance(sample, list) or is_finished(sample):
        return await _reward(args, config, sample)
    state = GenerateState(args)
    if sample.status is Sample.Status.ABORTED:
        trace_next_attempt(sample)
    with trace_span(sample, "generate_and_rm"):
        async with state.semaphore:
            if state.aborted:
                sample.status = Sample.Status.ABORTED
                return sample
            with state.dp_rank_context():
                entry = await _call_generate(args, config, sample, sampling_params, evaluation)
        if not evaluation:
            for observer in current_run().observers:
                observer.answered(sample, entry)
        entry = await apply_rollout_sample_hooks(args, entry, evaluation=evaluation)
        return await _reward(args, config, entry)


def mask_earlier_tokens(config: RolloutConfig, entry: Entry) -> None:
    """With ``--mask-offpolicy-in-partial-rollout``, zero the loss mask of tokens drawn by older weights."""
    is_masking = config.partial_rollout and config.mask_offpolicy_in_partial_rollout
    observers = current_run().observers
    for sample in leaf_samples(entry):
        is_masked = any([observer.has_mask(sample) for observer in observers])
        if is_masking and sample.response_length > 0 and not is_masked:
            sample.loss_mask = [0] * sample.response_length
        elif sample.response_length > 0 or not sample.weight_versions:
            continue
        sample.num_untrained_calls = len(sample.weight_versions)


async def _call_generate(
    args: Namespace, config: RolloutConfig, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Entry:
    """Call the sample's own generate function, else ``--custom-generate-function-path``, else the built-in one."""
    path = sample.generate_function_path or config.custom_generate_function_path
    if path is None:
        return await generate(args, sample, sampling_params)
    function: Callable[..., Any] = load_function(path)
    keywords = {"evaluation": evaluation} if "evaluation" in parameters_of(function) else {}
    flag = "--custom-generate-function-path" if path == config.custom_generate_function_path else "--eval-config"
    call = PluginCall(flag, path, sample)
    entry = await await_plugin(call, function, args, sample, sampling_params, **keywords)
    if not isinstance(entry, Sample | list):
        raise HookError(f"{call} returned {type(entry).__name__}; it must return a Sample or a list of Samples.")
    check_samples(entry, f"{call} returned")
    is_ending = GenerateState(args).aborted
    for part in leaf_samples(entry):
        part.index = sample.index if part.index is None else part.index
        part.group_index = sample.group_index if part.group_index is None else part.group_index
        if part.status is Sample.Status.PENDING and part.response_length and not is_ending:
            part.status = Sample.Status.COMPLETED
        if part.status is Sample.Status.ABORTED and part.remove_sample:  # the function gave up on it
            part.remove_sample = False
            if not is_ending:  # the end of the rollout may be why: the sample is then generated again in another one
                leave_out(RewardConfig.of(args), part, RuntimeError(f"{call} gave it up"))
    return entry


async def _reward(args: Namespace, config: RolloutConfig, entry: Entry) -> Entry:
    """Reward samples without a reward, unless the group is rewarded as a whole or the entry was aborted."""
    leaves = list(leaf_samples(entry))
    if any([observer.lacks_hooks(sample) for observer in current_run().observers for sample in leaves]):
        entry = await apply_rollout_sample_hooks(args, entry)
        leaves = list(leaf_samples(entry))
    if config.group_rm or any(sample.status == Sample.Status.ABORTED for sample in leaves):
        return entry
    if isinstance(entry, Sample):
        if entry.reward is None:
            with trace_span(entry, "reward_model"):
                entry.reward = await async_rm(args, entry)
        return entry
    unrewarded = [sample for sample in leaves if sample.reward is None]
    if unrewarded:
        with trace_span(unrewarded, "reward_model"):
            if asks_for_lists(RewardConfig.of(args).custom_rm_path):
                rewards = await batched_async_rm(args, unrewarded)
            else:
                rewards = await asyncio.gather(*(async_rm(args, sample) for sample in unrewarded))
            _set_rewards(unrewarded, rewards)
    return entry


def _set_rewards(samples: list[Sample], rewards: Any) -> None:
    """Set the rewards that a reward function returned for these samples."""
    if not is_one_each(rewards, samples):
        given = f"{len(rewards)} rewards" if isinstance(rewards, list | tuple) else str(rewards)[:80]
        raise HookError(
            f"The reward function gave {given} for {len(samples)} samples; given a list of samples, it must "
            "return a list with one reward for each. Change the function that --custom-rm-path names."
        )
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward


# One prompt


async def generate_and_rm_group(
    args: Namespace, group: Group, sampling_params: dict[str, Any], evaluation: bool = False
) -> Group:
    """Run all executions of one prompt concurrently; with ``--group-rm``, reward them together.

    A group whose samples are all finished (surplus of an earlier rollout) sends no request and keeps its masks.  If
    the rollout is aborted, unfinished samples are returned as they are.
    """
    config, state = RolloutConfig.of(args), GenerateState(args)
    if state.aborted:
        return group
    if not is_finished(group):
        with trace_span(group, "generate_and_rm_group"):
            group = await _run_entries(args, config, group, sampling_params, evaluation)
    elif not config.group_rm:
        group = list(await asyncio.gather(*(_reward(args, config, entry) for entry in group)))
    if config.group_rm and not state.aborted and is_finished(group):
        leaves = list(leaf_samples(group))
        if any(sample.reward is None for sample in leaves):
            with trace_span(leaves, "group_reward_model"):
                _set_rewards(leaves, await batched_async_rm(args, leaves))
    return group


async def _run_entries(
    args: Namespace, config: RolloutConfig, group: Group, sampling_params: dict[str, Any], evaluation: bool
) -> Group:
    """Run all entries, each with its own sampling parameters and session."""
    before: list[Sample | None] = []
    tasks = []
    for position, entry in enumerate(group):
        for sample in leaf_samples(entry):
            sample.session_id = sample.session_id or str(uuid.uuid4())
        before.append(_restart_point(config, entry))
        params = copy_plain(sampling_params)
        if config.sglang_enable_deterministic_inference:
            params["sampling_seed"] = config.rollout_seed + position
        tasks.append(asyncio.create_task(generate_and_rm(args, entry, params, evaluation=evaluation)))
    try:
        entries = await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)
    return [_restart_if_broken(entry, start) for entry, start in zip(entries, before, strict=True)]


def _restart_point(config: RolloutConfig, entry: Entry) -> Sample | None:
    """Return a copy of the sample before a custom generate function changes it; None for the built-in function."""
    if isinstance(entry, list) or not (entry.generate_function_path or config.custom_generate_function_path):
        return None
    snapshot = copy.copy(entry)
    for name, value in vars(entry).items():
        if isinstance(value, list | dict):
            setattr(snapshot, name, copy.copy(value))
    return snapshot


def _restart_if_broken(entry: Entry, start: Sample | None) -> Entry:
    """Replace an interrupted fan-out by the sample it started from: its parts cannot be continued."""
    if start is None or isinstance(entry, Sample) or is_finished(entry):
        return entry
    start.status = Sample.Status.ABORTED
    return start


# The rollout


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Run one rollout or one evaluation; the default ``--rollout-function-path`` and ``--eval-function-path``.

    Groups for later rollouts are returned to the data source by ``data_source.add_samples``.
    """
    # The coroutines enforce --rollout-timeout-s themselves, with more specific errors.
    timeout_s = RolloutConfig.of(args).rollout_timeout_s + 2 * IDLE_WAIT_S
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
        The kept groups, sorted by their first sample's ``index``, with metrics; and the groups to return to the data
        source: with ``--partial-rollout``, finished surplus groups and then interrupted ones; otherwise none.

    Raises:
        EngineError: no engine answered.
        DeadlineError: ``--rollout-timeout-s`` passed.
        DataError: the data source gave no groups, or groups of the wrong size.
    """
    pool = GroupPool(args, GenerateState(args), generate_and_rm_group, rollout_id=rollout_id)
    config = pool.config
    wait = LongWait(f"rollout {rollout_id}", config.rollout_batch_size, timeout_s=config.rollout_timeout_s)
    try:
        if config.max_staleness is not None:
            await pool.bound.clock.refresh(rollout_id)
        while len(pool.kept) < config.rollout_batch_size:
            while pool.num_outstanding < config.rollout_batch_size:
                groups = get_samples(config.over_sampling_batch_size)
                if not groups:
                    raise pool.no_groups_error()
                pool.admit(groups)
                await pool.submit(groups)
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


def _count_left_over(metrics: dict[str, float], surplus: list[Group], interrupted: list[Group]) -> dict[str, float]:
    """Count the groups that were neither kept nor dropped: returned to the data source, or discarded."""
    left_over = metrics["rollout/groups/issued"] - metrics["rollout/groups/kept"] - metrics["rollout/groups/dropped"]
    num_returned = len(surplus) + len(interrupted)
    num_unfinished = sum(not is_finished(group) for group in interrupted)
    return {
        "rollout/groups/returned": num_returned,
        "rollout/groups/returned_unfinished": num_unfinished,
        "rollout/groups/returned_finished": num_returned - num_unfinished,
        "rollout/groups/discarded": left_over - num_returned,
    }


# Its abort


async def abort(args: Namespace, rollout_id: int, *, timeout_s: float | None = None) -> list[Group]:
    """Abort every pending group of the rollout and wait until all have come back.

    A request may reach its engine after the first abort, so the abort is repeated until nothing is pending.

    Args:
        timeout_s: Seconds to wait; defaults to ``--rollout-timeout-s``.

    Returns:
        With ``--partial-rollout``, the groups in submission order, unfinished or just finished, with
        ``metadata["start_rollout_id"]`` set on samples that have response tokens; otherwise an empty list.

    Raises:
        DeadlineError: a group was still pending after ``timeout_s``.
        HookError: a custom function cancelled a group.
    """
    config, state = RolloutConfig.of(args), GenerateState(args)
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
            left = f"{len(pending)} groups pending"
            wait.show(num_done, left)
            if pending and wait.remaining_s <= 0:
                what = f"The abort of rollout {rollout_id}"
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
    """Repeat the abort until the engines are idle: requests of custom functions may outlive their callers."""
    deadline_s = time.monotonic() + IDLE_WAIT_S
    while busy := await _find_busy(config):
        if time.monotonic() > deadline_s:
            logger.warning("Engines still busy %.0f s after the abort (requests by engine): %s", IDLE_WAIT_S, busy)
            return
        await asyncio.sleep(repeat_s)
        repeat_s = min(2 * repeat_s, MAX_REPEAT_S)
        await abort_engines(config)


async def _find_busy(config: RolloutConfig) -> dict[str, int | None]:
    """Return the engines that hold requests; if the router does not list its engines, return the router instead."""
    try:
        return {url: load for url, load in (await engine_loads(config)).items() if load}
    except ProcessError:  # the router is restarting, or its failure will end the run
        return {config.router_url: None}


# The evaluation


async def eval_rollout(args: Namespace, rollout_id: int) -> RolloutFnEvalOutput:
    """Evaluate all ``args.eval_datasets`` concurrently; nothing is filtered, aborted or returned to a data source.

    Returns:
        ``data[name] = {"rewards": [...], "truncated": [...], "samples": [...]}``, in prompt order.

    Raises:
        ConfigError: ``--group-rm`` is set, but evaluation grades each answer separately.
        EngineError: no engine answered.
        DeadlineError: ``--rollout-timeout-s`` passed.
    """
    if RolloutConfig.of(args).group_rm:
        raise ConfigError(
            "--group-rm is set, but evaluation grades each answer separately. Turn evaluation off (--eval-interval), "
            "or set another evaluation function with --eval-function-path."
        )
    calls = [eval_rollout_single_dataset(args, rollout_id, dataset) for dataset in args.eval_datasets]
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)
    return RolloutFnEvalOutput(data={name: result for part in results for name, result in part.items()})


async def eval_rollout_single_dataset(
    args: Namespace, rollout_id: int, dataset_cfg: EvalDatasetConfig
) -> dict[str, dict[str, list[Any]]]:
    """Evaluate one data set and return ``{name: {"rewards", "truncated", "samples"}}``.

    For a reward dict, ``rewards`` holds its entry ``--eval-reward-key`` (or ``--reward-key`` if unset).
    """
    config, name = RolloutConfig.of(args), dataset_cfg.name
    requests = requests_of(config, dataset_cfg, load_dataset(args, dataset_cfg, GenerateState(args)).samples)
    tasks = [asyncio.create_task(_evaluate(args, config, sample, params)) for sample, params in requests]
    await wait_for_all(config, f"evaluation of {name} at rollout {rollout_id}", tasks, "answers")
    leaves = [leaf for task in tasks for leaf in leaf_samples(task.result())]
    return {name: results_of(leaves, config.eval_reward_key or config.reward_key, name)}


async def _evaluate(args: Namespace, config: RolloutConfig, sample: Sample, params: dict[str, Any]) -> Entry:
    """Generate and grade one answer; continue an aborted one, with at most ``MAX_EVAL_ATTEMPTS`` attempts in all."""
    start: Entry = sample
    for _ in range(MAX_EVAL_ATTEMPTS):
        before = _restart_point(config, start)
        entry = await generate_and_rm(args, start, dict(params), evaluation=True)
        if is_finished(entry):
            return entry
        start = _restart_if_broken(entry, before)
    raise EngineError(
        f"Evaluation sample {sample.index} was aborted {MAX_EVAL_ATTEMPTS} times. Engines abort requests that do "
        "not fit their context; look at their logs and at --eval-max-prompt-len."
    )
