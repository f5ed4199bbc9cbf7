"""One prompt's siblings: generate each, run the sample hooks, then the reward.

``run_execution`` is the ``generate_and_rm`` of ``slime.rollout.sglang_rollout``, ``run_group`` its
``generate_and_rm_group``.  They reach each other through the context's entry points, which plug-ins may replace.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Callable
from typing import Any

from slime.flags.reward import reward_config
from slime.observability.trace_utils import trace_next_attempt, trace_span
from slime.rollout.base_types import Entry, Group, check_samples, is_finished, leaf_samples
from slime.rollout.config import RolloutConfig
from slime.rollout.context import RolloutContext
from slime.rollout.rm_hub.policy import is_one_each, leave_out
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.rollout.waiting import cancel_all
from slime.utils.errors import HookError
from slime.utils.misc import copy_plain, parameters_of
from slime.utils.plugins import PluginCall, await_plugin
from slime.utils.types import Sample


def mask_earlier_tokens(context: RolloutContext, entry: Entry) -> None:
    """Zero the loss mask of tokens that older weights drew, with ``--mask-offpolicy-in-partial-rollout``."""
    config = context.config
    is_masking = config.partial_rollout and config.mask_offpolicy_in_partial_rollout
    for sample in leaf_samples(entry):
        # What the ledger recovered into the rollout that drew it has the mask that it had there.
        is_masked = False
        if sample.recovered_in_rollout is not None:
            is_masked = sample.recovered_in_rollout == context.run.rollout_id
            sample.recovered_in_rollout = None
        if is_masking and sample.response_length > 0 and not is_masked:
            sample.loss_mask = [0] * sample.response_length
        elif sample.response_length > 0 or not sample.weight_versions:
            continue
        sample.num_untrained_calls = len(sample.weight_versions)


async def run_execution(
    context: RolloutContext, entry: Entry, sampling_params: dict[str, Any], *, evaluation: bool
) -> Entry:
    """Generate and reward one execution, unless it is answered already or has failed for good."""
    mask_earlier_tokens(context, entry)
    if isinstance(entry, list) or is_finished(entry):
        return await _reward(context, entry)
    if entry.status is Sample.Status.ABORTED:
        trace_next_attempt(entry)
    with trace_span(entry, "generate_and_rm"):
        return await _execute(context, entry, sampling_params, evaluation)


async def _execute(
    context: RolloutContext, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Entry:
    """Generate, when it is the sample's turn; then hooks and reward."""
    state = context.state()
    async with state.semaphore:
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        with state.dp_rank_context():
            entry = await _call_generate(context, sample, sampling_params, evaluation)
    if not evaluation:
        context.journal.record_response(sample, entry)
    entry = await apply_rollout_sample_hooks(context.args, entry, evaluation=evaluation)
    return await _reward(context, entry)


async def _call_generate(
    context: RolloutContext, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Entry:
    """Call the sample's own generate function, else ``--custom-generate-function-path``, else the built-in one."""
    args, points = context.args, context.entry_points
    path = sample.generate_function_path or context.config.custom_generate_function_path
    if path is None:
        return await points.generate(args, sample, sampling_params)
    function: Callable[..., Any] = points.load_function(path)
    keywords = {"evaluation": evaluation} if "evaluation" in parameters_of(function) else {}
    is_of_run = path == context.config.custom_generate_function_path
    flag = "--custom-generate-function-path" if is_of_run else "--eval-config"
    call = PluginCall(flag, path, sample)
    entry = await await_plugin(call, function, args, sample, sampling_params, **keywords)
    if not isinstance(entry, Sample | list):
        raise HookError(f"{call} returned {type(entry).__name__}; it must return a Sample or a list of Samples.")
    check_samples(entry, f"{call} returned")
    _settle_given_up(context, entry, call)
    return entry


def _settle_given_up(context: RolloutContext, entry: Entry, call: PluginCall) -> None:
    """Leave out the samples that a generate function gave up: ABORTED, to be removed.

    Where the rollout is over, that may be why; they begin again in another.
    """
    for sample in leaf_samples(entry):
        if sample.status is Sample.Status.ABORTED and sample.remove_sample:
            sample.remove_sample = False
            if not context.state().aborted:
                leave_out(reward_config(context.args), sample, RuntimeError(f"{call} gave it up"))


async def _reward(context: RolloutContext, entry: Entry) -> Entry:
    """Reward the samples that have none, unless the whole group is rewarded at once or the entry was aborted.

    An answer that the ledger recovered may not have been seen by the sample hooks yet.
    """
    leaves = list(leaf_samples(entry))
    if any(sample.hooks_are_due for sample in leaves):
        for sample in leaves:
            sample.hooks_are_due = False
        entry = await apply_rollout_sample_hooks(context.args, entry)
        leaves = list(leaf_samples(entry))
    if context.config.group_rm or any(sample.status == Sample.Status.ABORTED for sample in leaves):
        return entry
    if isinstance(entry, Sample):
        if entry.reward is None:
            with trace_span(entry, "reward_model"):
                entry.reward = await context.entry_points.async_rm(context.args, entry)
        return entry
    unrewarded = [sample for sample in leaves if sample.reward is None]
    if unrewarded:
        await assign_rewards(context, unrewarded)
    return entry


async def assign_rewards(context: RolloutContext, samples: list[Sample]) -> None:
    """Reward samples in one call of ``batched_async_rm``."""
    with trace_span(samples, "group_reward_model" if context.config.group_rm else "reward_model"):
        rewards = await context.entry_points.batched_async_rm(context.args, samples)
    if not is_one_each(rewards, samples):
        given = f"{len(rewards)} rewards" if isinstance(rewards, list | tuple) else str(rewards)[:80]
        raise HookError(
            f"The reward function gave {given} for {len(samples)} samples; called with a list, it must return a list "
            "with one reward each. Change the function that --custom-rm-path names."
        )
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward


async def run_group(
    context: RolloutContext, group: Group, sampling_params: dict[str, Any], *, evaluation: bool
) -> Group:
    """Run all executions of one prompt at once, unless they are finished already."""
    state = context.state()
    is_graded_whole = context.config.group_rm
    if state.aborted:
        return group
    if is_finished(group):
        if not is_graded_whole:
            group = list(await asyncio.gather(*(_reward(context, entry) for entry in group)))
    else:
        with trace_span(group, "generate_and_rm_group"):
            group = await _run_entries(context, group, sampling_params, evaluation)
    if is_graded_whole and not state.aborted and is_finished(group):
        leaves = list(leaf_samples(group))
        if any(sample.reward is None for sample in leaves):
            await assign_rewards(context, leaves)
    return group


async def _run_entries(
    context: RolloutContext, group: Group, sampling_params: dict[str, Any], evaluation: bool
) -> Group:
    """Run every entry, each with its own sampling parameters and session."""
    config = context.config
    before: list[Sample | None] = []
    tasks = []
    for position, entry in enumerate(group):
        for sample in leaf_samples(entry):
            sample.session_id = sample.session_id or str(uuid.uuid4())
        before.append(restart_point(config, entry))
        params = copy_plain(sampling_params)
        if config.sglang_enable_deterministic_inference:
            params["sampling_seed"] = config.rollout_seed + position
        call = context.entry_points.generate_and_rm(context.args, entry, params, evaluation=evaluation)
        tasks.append(asyncio.create_task(call))
    try:
        entries = await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)
    return [restart_if_broken(entry, start) for entry, start in zip(entries, before, strict=True)]


def restart_point(config: RolloutConfig, entry: Entry) -> Sample | None:
    """Return the sample as it is before a custom generate function gets it; None where the built-in one runs."""
    if isinstance(entry, list) or not (entry.generate_function_path or config.custom_generate_function_path):
        return None
    snapshot = copy.copy(entry)
    for name, value in vars(entry).items():
        if isinstance(value, list | dict):
            setattr(snapshot, name, copy.copy(value))
    return snapshot


def restart_if_broken(entry: Entry, start: Sample | None) -> Entry:
    """Return the sample that an interrupted fan-out started from: it cannot be continued from its parts."""
    if start is None or isinstance(entry, Sample) or is_finished(entry):
        return entry
    start.status = Sample.Status.ABORTED
    return start
