"""Which flags must be the same for samples of an earlier process to be of use."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.rollout.ledger.story import HARD, SOFT

SAMPLE_FLAGS = (
    "hf_checkpoint",
    "prompt_data",
    "input_key",
    "label_key",
    "apply_chat_template",
    "data_source_path",
    "rollout_seed",
    "rollout_shuffle",
    "rollout_max_prompt_len",
    "n_samples_per_prompt",
    "rollout_temperature",
    "rollout_top_p",
    "rollout_top_k",
    "rollout_max_response_len",
    "rollout_stop",
    "rollout_stop_token_ids",
    "custom_generate_function_path",
    "rm_type",
    "custom_rm_path",
    "group_rm",
)
"""With another value here, a recorded sample is not what this run would make."""

BATCH_FLAGS = (
    "rollout_batch_size",
    "over_sampling_batch_size",
    "partial_rollout",
    "mask_offpolicy_in_partial_rollout",
    "rollout_function_path",
    "dynamic_sampling_filter_path",
    "rollout_sample_filter_path",
    "buffer_filter_path",
)
"""With another value here, samples are of use, but whole rollouts are not repeated."""

_HOOKS = (
    "custom_generate_function_path",
    "custom_rm_path",
    "rollout_sample_hook_path",
    "rollout_sample_filter_path",
    "dynamic_sampling_filter_path",
    "rollout_all_samples_process_path",
)

_LATE_HOOKS = ("dynamic_sampling_filter_path", "rollout_sample_filter_path", "rollout_all_samples_process_path")


def facts_of(args: Namespace) -> dict[str, Any]:
    """The values of these flags, as text."""
    return {
        HARD: {name: str(getattr(args, name, None)) for name in SAMPLE_FLAGS},
        SOFT: {name: str(getattr(args, name, None)) for name in BATCH_FLAGS},
    }


def has_user_code(args: Namespace) -> bool:
    """Whether lists of a sample may be edited in place between two records, so that each is looked through again."""
    return any(getattr(args, name, None) for name in _HOOKS)


def has_late_user_code(args: Namespace) -> bool:
    """Whether samples may be edited in place between the end of their group and the end of the rollout."""
    names = ("rollout_function_path", *_LATE_HOOKS)
    return any(not path.startswith("slime.") for name in names if (path := getattr(args, name, None)))


def has_sample_hooks(args: Namespace) -> bool:
    """Whether an answer may be edited in place while it waits to be written, so that its lists are copied first."""
    return bool(getattr(args, "rollout_sample_hook_path", None))
