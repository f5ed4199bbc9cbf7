"""Evaluation data: requests from the prompts of each ``--eval-prompt-data`` set, and results."""

from __future__ import annotations

import copy
import uuid
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from slime.flags.evaluation import EvalDatasetConfig
from slime.rollout.config import RolloutConfig
from slime.rollout.prompt_dataset import Dataset
from slime.rollout.prompt_files import readers_of
from slime.rollout.tools import TurnsConfig, toolbox
from slime.utils.errors import ConfigError
from slime.utils.misc import copy_plain
from slime.utils.processing_utils import media_of
from slime.utils.types import Sample

_datasets: dict[Any, Dataset] = {}
"""Loaded evaluation sets, reused by every evaluation."""


def requests_of(
    config: RolloutConfig, dataset_cfg: EvalDatasetConfig, prompts: Sequence[Sample]
) -> list[tuple[Sample, dict[str, Any]]]:
    """Return a new sample with its sampling parameters for every requested answer, prompt by prompt."""
    shared_params = eval_sampling_params(config, dataset_cfg)
    requests: list[tuple[Sample, dict[str, Any]]] = []
    for number, prompt in enumerate(prompts):
        for copy_index in range(dataset_cfg.n_samples_per_eval_prompt):
            sample = copy.deepcopy(prompt, {id(item): item for item in media_of(prompt)})  # images are shared
            sample.index = len(requests)
            sample.group_index = number
            sample.session_id = str(uuid.uuid4())
            sample.metadata = dataset_cfg.inject_metadata(sample.metadata)
            sample.custom_rm_path = dataset_cfg.custom_rm_path or ("" if dataset_cfg.rm_type else None)
            sample.generate_function_path = dataset_cfg.custom_generate_function_path
            params = copy_plain(shared_params)
            if config.sglang_enable_deterministic_inference:
                params["sampling_seed"] = config.rollout_seed + copy_index
            requests.append((sample, params))
    return requests


def load_dataset(args: Namespace, dataset_cfg: EvalDatasetConfig, state: Any) -> Dataset:
    """Return the data set of a config, reading it on first use."""
    key = (
        dataset_cfg.cache_key,
        args.hf_checkpoint,
        dataset_cfg.apply_chat_template,
        repr(dataset_cfg.multimodal_keys),
        repr(dataset_cfg.apply_chat_template_kwargs),
        args.eval_max_prompt_len,
    )
    if key not in _datasets:
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
            tools=toolbox(TurnsConfig.of(args)).schemas,
            readers=readers_of(args),
        )
    return _datasets[key]


def eval_sampling_params(config: RolloutConfig, dataset_cfg: EvalDatasetConfig) -> dict[str, Any]:
    """Return the ``sampling_params`` of a data set; unset stop and detokenizer options use ``--rollout-*`` flags."""

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


def results_of(samples: list[Sample], key: str | None, name: str) -> dict[str, list[Any]]:
    """Return the results of data set ``name``, taking the entry ``key`` of rewards that are dicts.

    Raises:
        ConfigError: a reward dict has no entry ``key``.
    """
    return {
        "rewards": [_reward_number(sample, key, name) for sample in samples],
        "truncated": [sample.status == Sample.Status.TRUNCATED for sample in samples],
        "samples": samples,
    }


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
