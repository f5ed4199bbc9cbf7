"""Evaluation: every prompt of every ``--eval-prompt-data`` set, answered and graded.

Nothing is filtered, aborted or given back; each sample goes through ``generate_and_rm`` with ``evaluation=True``
and its own copy of the data set's sampling parameters.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import uuid
from collections.abc import Mapping
from typing import Any

from slime.rollout.base_types import Entry, RolloutFnEvalOutput, is_finished, leaf_samples
from slime.rollout.config import RolloutConfig
from slime.rollout.context import RolloutContext
from slime.rollout.eval_config import EvalDatasetConfig
from slime.rollout.generate_group import restart_if_broken, restart_point
from slime.rollout.prompt_dataset import Dataset
from slime.rollout.tools import toolbox
from slime.rollout.waiting import LongWait, cancel_all, deadline_error
from slime.utils.errors import ConfigError, EngineError
from slime.utils.processing_utils import media_of
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

MAX_SAMPLE_ATTEMPTS = 3
"""Attempts to generate a sample that comes back aborted although nobody aborted it."""

_datasets: dict[Any, Dataset] = {}
"""Loaded evaluation sets: they are the same in every evaluation."""


async def evaluate_all(context: RolloutContext, rollout_id: int) -> RolloutFnEvalOutput:
    """Evaluate all of ``args.eval_datasets`` at once; ``eval_rollout`` of ``slime.rollout.sglang_rollout`` is this."""
    if context.config.group_rm:
        raise ConfigError(
            "--group-rm is set, and evaluation grades each answer by itself. Turn evaluation off "
            "(--eval-interval), or give the evaluation a function of its own with --eval-function-path."
        )
    call = context.entry_points.eval_rollout_single_dataset
    tasks = [asyncio.create_task(call(context.args, rollout_id, config)) for config in context.args.eval_datasets]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)
    return RolloutFnEvalOutput(data={name: result for part in results for name, result in part.items()})


async def evaluate_dataset(
    context: RolloutContext, rollout_id: int, dataset_cfg: EvalDatasetConfig
) -> dict[str, dict[str, list[Any]]]:
    """Evaluate one data set: ``{name: {"rewards", "truncated", "samples"}}``.

    Rewards are numbers: of a reward that is a dict, the entry ``--eval-reward-key`` (else ``--reward-key``).
    """
    config = context.config
    samples = _samples_of(context, dataset_cfg)
    params = eval_sampling_params(config, dataset_cfg)
    num_copies = dataset_cfg.n_samples_per_eval_prompt
    tasks = [
        asyncio.create_task(_evaluate(context, sample, _params_of_copy(config, params, position % num_copies)))
        for position, sample in enumerate(samples)
    ]
    await _wait_for_all(config, rollout_id, dataset_cfg.name, tasks)
    leaves = [leaf for task in tasks for leaf in leaf_samples(task.result())]
    key = config.eval_reward_key or config.reward_key
    return {dataset_cfg.name: results_of(leaves, key, dataset_cfg.name)}


def results_of(samples: list[Sample], key: str | None, name: str) -> dict[str, list[Any]]:
    """Return the results of data set ``name``; of a reward that is a dict, the entry ``key`` counts.

    Raises:
        ConfigError: a reward has no such entry.
    """
    return {
        "rewards": [_reward_number(sample, key, name) for sample in samples],
        "truncated": [sample.status == Sample.Status.TRUNCATED for sample in samples],
        "samples": samples,
    }


def eval_sampling_params(config: RolloutConfig, dataset_cfg: EvalDatasetConfig) -> dict[str, Any]:
    """Make the ``sampling_params`` of a data set; stop and detokenizer options fall back to ``--rollout-*`` flags."""

    def first_set(value: Any, fallback: Any) -> Any:
        return fallback if value is None else value

    params: dict[str, Any] = {
        "temperature": dataset_cfg.temperature,
        "top_p": dataset_cfg.top_p,
        "top_k": dataset_cfg.top_k,
        "max_new_tokens": dataset_cfg.max_response_len,
        "stop": first_set(dataset_cfg.stop, config.rollout_stop),
        "stop_token_ids": first_set(dataset_cfg.stop_token_ids, config.rollout_stop_token_ids),
        "skip_special_tokens": first_set(dataset_cfg.skip_special_tokens, config.rollout_skip_special_tokens),
        "no_stop_trim": first_set(dataset_cfg.no_stop_trim, True),
        "spaces_between_special_tokens": False,
    }
    for name in ("repetition_penalty", "min_new_tokens"):
        if getattr(dataset_cfg, name) is not None:
            params[name] = getattr(dataset_cfg, name)
    return params


def _params_of_copy(config: RolloutConfig, params: Mapping[str, Any], copy_index: int) -> dict[str, Any]:
    """Copy the parameters for the ``copy_index``-th answer to a prompt, with a seed of its own when deterministic."""
    own = copy.deepcopy(dict(params))
    if config.sglang_enable_deterministic_inference:
        own["sampling_seed"] = config.rollout_seed + copy_index
    return own


def _samples_of(context: RolloutContext, dataset_cfg: EvalDatasetConfig) -> list[Sample]:
    """Make a fresh sample for every answer wanted, prompt by prompt."""
    dataset = _load_dataset(context, dataset_cfg)
    samples: list[Sample] = []
    for number, prompt in enumerate(dataset.samples):
        for _ in range(dataset_cfg.n_samples_per_eval_prompt):
            sample = copy.deepcopy(prompt, {id(item): item for item in media_of(prompt)})  # pictures are shared
            sample.index = len(samples)
            sample.group_index = number
            sample.session_id = str(uuid.uuid4())
            sample.metadata = dataset_cfg.inject_metadata(sample.metadata)
            sample.custom_rm_path = dataset_cfg.custom_rm_path or ("" if dataset_cfg.rm_type else None)
            sample.generate_function_path = dataset_cfg.custom_generate_function_path
            samples.append(sample)
    return samples


def _load_dataset(context: RolloutContext, dataset_cfg: EvalDatasetConfig) -> Dataset:
    """Return the data set of a config, read once."""
    args = context.args
    key = (
        dataset_cfg.cache_key,
        args.hf_checkpoint,
        dataset_cfg.apply_chat_template,
        repr(dataset_cfg.multimodal_keys),
        repr(dataset_cfg.apply_chat_template_kwargs),
        args.eval_max_prompt_len,
    )
    if key not in _datasets:
        state = context.state()
        _datasets[key] = Dataset(
            dataset_cfg.path,
            state.tokenizer,
            state.processor,
            args.eval_max_prompt_len,
            prompt_key=dataset_cfg.input_key or args.input_key,
            label_key=dataset_cfg.label_key,
            tool_key=dataset_cfg.tool_key,
            metadata_key=dataset_cfg.metadata_key,
            multimodal_keys=dataset_cfg.multimodal_keys,
            apply_chat_template=dataset_cfg.apply_chat_template,
            apply_chat_template_kwargs=dataset_cfg.apply_chat_template_kwargs,
            tools=toolbox(args).schemas,
        )
    return _datasets[key]


async def _evaluate(context: RolloutContext, sample: Sample, params: dict[str, Any]) -> Entry:
    """Generate and grade one answer; an answer that an engine broke off is continued, a few times."""
    start: Entry = sample
    for _ in range(MAX_SAMPLE_ATTEMPTS):
        before = restart_point(context.config, start)
        entry = await context.entry_points.generate_and_rm(context.args, start, dict(params), evaluation=True)
        if is_finished(entry):
            return entry
        start = restart_if_broken(entry, before)
    raise EngineError(
        f"Evaluation sample {sample.index} was broken off {MAX_SAMPLE_ATTEMPTS} times. Engines abort requests that do "
        "not fit their context; look at their logs and at --eval-max-prompt-len."
    )


async def _wait_for_all(config: RolloutConfig, rollout_id: int, name: str, tasks: list[asyncio.Task[Entry]]) -> None:
    """Return when every task is done; raise what the first failing one raised.

    Wakes once an interval, not once a task, so that thousands of tasks cost no more than a few.

    Raises:
        DeadlineError: some were not done within ``--rollout-timeout-s``.
    """
    wait = LongWait(f"eval {name} at rollout {rollout_id}", len(tasks), timeout_s=config.rollout_timeout_s)
    pending = set(tasks)
    try:
        while pending:
            timeout_s = min(wait.interval_s, wait.remaining_s)
            done, pending = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            num_done = len(tasks) - len(pending)
            wait.show(num_done, "answers")
            if pending and wait.remaining_s <= 0:
                what, left = f"The evaluation of {name}", f"{len(pending)} answers pending"
                raise await deadline_error(config, what, wait, num_done=num_done, pending=left)
    finally:
        wait.close()
        await cancel_all(pending)


def _reward_number(sample: Sample, key: str | None, name: str) -> Any:
    """Return the number to average."""
    if key is None or not isinstance(sample.reward, dict):
        return sample.reward
    if key not in sample.reward:
        raise ConfigError(
            f"The reward of evaluation set {name} has no entry {key!r}; it has {', '.join(map(str, sample.reward))}. "
            "Set --eval-reward-key (or --reward-key) to one of these."
        )
    return sample.reward[key]
