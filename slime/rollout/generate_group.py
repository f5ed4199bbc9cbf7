"""One prompt's siblings: generate each, run the sample hooks, then the reward.

``generate_and_rm`` does it for one execution, ``generate_and_rm_group`` for all executions of a prompt at once.  Both
are looked up in ``slime.rollout.sglang_rollout`` at every call, so that plug-ins may replace them.
"""

from __future__ import annotations

import asyncio
import copy
import random
import uuid
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from slime.observability.trace_utils import trace_next_attempt, trace_span
from slime.rollout import ledger
from slime.rollout.groups import Entry, Group, is_finished, leaf_samples
from slime.rollout.replaceable import entry_points
from slime.rollout.sample_hooks import apply_rollout_sample_hooks, current_rollout_id
from slime.rollout.waiting import cancel_all
from slime.utils.errors import HookError
from slime.utils.misc import copy_plain, parameters_of
from slime.utils.types import Sample

_ANSWERED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


def mask_earlier_tokens(args: Namespace, entry: Entry) -> None:
    """Zero the loss mask of tokens that older weights drew, with ``--mask-offpolicy-in-partial-rollout``.

    ``num_untrained_calls`` notes how many entries of ``weight_versions`` drew nothing that is trained.
    """
    is_masking = args.partial_rollout and args.mask_offpolicy_in_partial_rollout
    for sample in leaf_samples(entry):
        # What the ledger recovered into the rollout that drew it has the mask that it had there.
        is_settled = is_masking and sample.__dict__.pop("recovered_in_rollout", -1) == current_rollout_id()
        if is_masking and sample.response_length > 0 and not is_settled:
            sample.loss_mask = [0] * sample.response_length
        elif sample.response_length > 0 or not sample.weight_versions:
            continue
        sample.num_untrained_calls = len(sample.weight_versions)  # type: ignore[attr-defined]


async def generate_and_rm(
    args: Namespace, sample: Entry, sampling_params: dict[str, Any], evaluation: bool = False
) -> Entry:
    """One execution with its reward: a Sample, or the list of Samples that a custom generate function made of it.

    An entry that is answered already is not generated again; an aborted one comes back without a reward.  With
    ``--group-rm`` rewards are left to ``generate_and_rm_group``.
    """
    mask_earlier_tokens(args, sample)
    if isinstance(sample, list) or sample.status in _ANSWERED:
        return await _reward(args, sample)
    if sample.status is Sample.Status.ABORTED:
        trace_next_attempt(sample)
    with trace_span(sample, "generate_and_rm"):
        return await _execute(args, sample, sampling_params, evaluation)


async def _execute(args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> Entry:
    """Generate, when it is the sample's turn; then hooks and reward."""
    state = entry_points().GenerateState(args)
    async with state.semaphore:
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        with state.dp_rank_context():
            entry = await _call_generate(args, sample, sampling_params, evaluation)
    if not evaluation:
        ledger.response(sample, entry)
    entry = await apply_rollout_sample_hooks(args, entry, evaluation=evaluation)
    return await _reward(args, entry)


async def _call_generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> Entry:
    """The sample's own generate function, else ``--custom-generate-function-path``, else the built-in one."""
    points = entry_points()
    path = sample.generate_function_path or args.custom_generate_function_path
    if path is None:
        return await points.generate(args, sample, sampling_params)
    function: Callable[..., Any] = points.load_function(path)
    keywords = {"evaluation": evaluation} if "evaluation" in parameters_of(function) else {}
    entry = await function(args, sample, sampling_params, **keywords)
    if not isinstance(entry, Sample | list):
        raise HookError(
            f"{path} returned {type(entry).__name__}; it must return a Sample or a list of Samples. "
            "Change the function that --custom-generate-function-path names."
        )
    return entry


async def _reward(args: Namespace, entry: Entry) -> Entry:
    """Reward the samples that have none, unless the whole group is rewarded at once or the entry was aborted.

    An answer that the ledger recovered may not have been seen by the sample hooks yet.
    """
    if any([sample.__dict__.pop("hooks_are_due", False) for sample in leaf_samples(entry)]):
        entry = await apply_rollout_sample_hooks(args, entry)
    if args.group_rm:
        return entry
    leaves = list(leaf_samples(entry))
    if any(sample.status == Sample.Status.ABORTED for sample in leaves):
        return entry
    points = entry_points()
    if isinstance(entry, Sample):
        if entry.reward is None:
            with trace_span(entry, "reward_model"):
                entry.reward = await points.async_rm(args, entry)
        return entry
    unrewarded = [sample for sample in leaves if sample.reward is None]
    if unrewarded:
        await assign_rewards(args, unrewarded)
    return entry


async def assign_rewards(args: Namespace, samples: list[Sample]) -> None:
    """Reward samples in one call of ``batched_async_rm``."""
    with trace_span(samples, "group_reward_model" if args.group_rm else "reward_model"):
        rewards = await entry_points().batched_async_rm(args, samples)
    if rewards is None or len(rewards) != len(samples):
        count = "nothing" if rewards is None else f"{len(rewards)} rewards"
        raise HookError(
            f"The reward function gave {count} for {len(samples)} samples; called with a list, it must return a list "
            "with one reward each. Change the function that --custom-rm-path names."
        )
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward


async def generate_and_rm_group(
    args: Namespace, group: Group, sampling_params: dict[str, Any], evaluation: bool = False
) -> Group:
    """All executions of one prompt, at once; rewarded together with ``--group-rm``.

    A group whose samples are all finished (kept surplus of an earlier rollout) sends no request and keeps its masks.
    When the rollout is aborted, what is unfinished comes back as it stands.
    """
    state = entry_points().GenerateState(args)
    if state.aborted:
        return group
    if is_finished(group):
        if not args.group_rm:
            group = list(await asyncio.gather(*(_reward(args, entry) for entry in group)))
    else:
        with trace_span(group, "generate_and_rm_group"):
            group = await _generate_entries(args, group, sampling_params, evaluation)
    if args.group_rm and not state.aborted and is_finished(group):
        leaves = list(leaf_samples(group))
        if any(sample.reward is None for sample in leaves):
            await assign_rewards(args, leaves)
    return group


_session_bits = random.Random(uuid.uuid4().int)
"""Of our own, so that a seed that plug-ins set does not repeat; ``uuid4`` asks the system every time."""


def _new_session_id() -> str:
    return str(uuid.UUID(int=_session_bits.getrandbits(128), version=4))


async def _generate_entries(args: Namespace, group: Group, sampling_params: dict[str, Any], evaluation: bool) -> Group:
    """Run ``generate_and_rm`` on every entry, each with its own sampling parameters and session."""
    deterministic = getattr(args, "sglang_enable_deterministic_inference", False)
    before: list[Sample | None] = []
    tasks = []
    for position, entry in enumerate(group):
        for sample in leaf_samples(entry):
            sample.session_id = sample.session_id or _new_session_id()
        before.append(restart_point(args, entry))
        params = copy_plain(sampling_params)
        if deterministic:
            params["sampling_seed"] = args.rollout_seed + position
        call = entry_points().generate_and_rm(args, entry, params, evaluation=evaluation)
        tasks.append(asyncio.create_task(call))
    try:
        entries = await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)
    return [restart_if_broken(entry, start) for entry, start in zip(entries, before, strict=True)]


def restart_point(args: Namespace, entry: Entry) -> Sample | None:
    """The sample as it is before a custom generate function gets it; None where the built-in one runs."""
    if isinstance(entry, list) or not (entry.generate_function_path or args.custom_generate_function_path):
        return None
    snapshot = copy.copy(entry)
    for name, value in vars(entry).items():
        if isinstance(value, list | dict):
            setattr(snapshot, name, copy.copy(value))
    return snapshot


def restart_if_broken(entry: Entry, start: Sample | None) -> Entry:
    """An interrupted fan-out cannot be continued from its parts: go back to the sample that it started from."""
    if start is None or isinstance(entry, Sample) or is_finished(entry):
        return entry
    start.status = Sample.Status.ABORTED
    return start
