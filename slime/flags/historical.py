"""Flags without a feature: historical ones are accepted and logged, those of missing features are rejected.

``HISTORICAL``: flags of older scripts and of Megatron's own training program, accepted so that a command written for
slime runs unchanged.  A value that requests different behavior is rejected.

``NOT_YET``: flags whose feature does not exist yet.  Using one is an error, never a silent no-op.
tests/contracts/test_flags.py proves that every other flag has a reader.
"""

from __future__ import annotations

import argparse
import logging
from argparse import Namespace
from typing import Any

from slime.algorithms.advantages import get_estimator
from slime.flags.group import FlagGroup, flag_of
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

_DATA = "the data are rollouts of --prompt-data"
_LENGTH = "the run is as long as --num-rollout or --num-epoch says"
_LOGS = "metrics and timers are always logged, once for each rollout"
_CHECKPOINT = "checkpoints are always written and read in parallel, in torch_dist format"
_CRITIC = "set it for the role critic in --megatron-config-path"
_ROUTER = "there is one router, that of SGLang (--router-policy, --router-...)"

HISTORICAL = {
    # of older slime
    "qkv_format": "training always packs sequences (thd)",
    "megatron_to_hf_mode": "weights are always converted by slime itself",
    "log_probs_max_tokens_per_gpu": "the log-prob pass uses the micro-batches of training (--max-tokens-per-gpu)",
    "ref_micro_batch_size": "the reference's pass uses the micro-batches of training (--micro-batch-size)",
    "http_proxy": "requests to engines never go through a proxy",
    "min_batch_collection_ratio": "nothing reads it",
    "use_critic": "there is a critic exactly with --advantage-estimator ppo",
    "critic_num_nodes": "the critic has as many GPUs as the actor",
    "critic_num_gpus_per_node": "the critic has as many GPUs as the actor",
    "critic_load": _CRITIC,
    "critic_save": _CRITIC,
    "critic_lr": _CRITIC,
    "critic_lr_warmup_iters": _CRITIC,
    "use_slime_router": _ROUTER,
    "slime_router_middleware_paths": _ROUTER,
    "slime_router_timeout": _ROUTER,
    "slime_router_max_connections": _ROUTER,
    "disable_rollout_trim_samples": "samples are never trimmed; what does not fill a step is said in a line",
    "use_hf_config_for_megatron": "model flags that are left out always come from config.json",
    "memory_snapshot_path": "snapshots name themselves, in --memory-snapshot-dir",
    # of Megatron's own training program
    "train_iters": _LENGTH,
    "train_samples": _LENGTH,
    "eval_iters": "evaluations are over whole data sets (--eval-interval)",
    "exit_interval": _LENGTH,
    "data_path": _DATA,
    "data_cache_path": _DATA,
    "split": _DATA,
    "mock_data": _DATA,
    "num_workers": _DATA,
    "reset_position_ids": "each packed sample has its own positions and attention",
    "reset_attention_mask": "each packed sample has its own positions and attention",
    "eod_mask_loss": "the loss mask of each sample says what is trained",
    "create_attention_mask_in_dataloader": "attention is over packed sequences, without a mask",
    "log_interval": _LOGS,
    "log_throughput": _LOGS,
    "log_params_norm": _LOGS,
    "timing_log_level": _LOGS,
    "timing_log_option": _LOGS,
    "log_timers_to_tensorboard": _LOGS,
    "log_memory_to_tensorboard": _LOGS,
    "log_validation_ppl_to_tensorboard": _LOGS,
    "log_world_size_to_tensorboard": _LOGS,
    "tensorboard_queue_size": _LOGS,
    "wandb_exp_name": "the run is named by --wandb-group",
    "wandb_save_dir": "W&B writes to --wandb-dir",
    "use_dist_ckpt": _CHECKPOINT,
    "dist_ckpt_format": _CHECKPOINT,
    "dist_ckpt_strictness": "a tensor that is missing or too much is always an error",
    "auto_detect_ckpt_format": _CHECKPOINT,
    "ckpt_fully_parallel_save": _CHECKPOINT,
    "ckpt_fully_parallel_load": _CHECKPOINT,
    "ckpt_assume_constant_structure": _CHECKPOINT,
    "use_persistent_ckpt_worker": _CHECKPOINT,
    "exit_on_missing_checkpoint": "a checkpoint that is not there is always an error",
    "use_mcore_models": "models are always built from megatron-core",
    "fp16_lm_cross_entropy": "log-probs and losses are computed in fp32",
    "use_flash_attn": "--attention-backend says which attention is used",
    "manual_gc": "Python collects its garbage as it likes",
    "manual_gc_interval": "Python collects its garbage as it likes",
    "empty_unused_memory_level": "memory is given back between the phases of a rollout",
    "profile": "--use-pytorch-profiler turns the profiler on",
    "profile_ranks": "the main rank is profiled",
    "local_rank": "ranks are placed by slime",
    "no_one_logger": "nothing is sent anywhere unless a flag names it",
    "logging_level": "the level is that of slime's own log",
}
"""Attribute of the flag -> why it has no effect."""

_SWITCHES = frozenset(
    {
        *("use_slime_router", "disable_rollout_trim_samples", "use_hf_config_for_megatron"),
        *("mock_data", "reset_position_ids", "reset_attention_mask", "eod_mask_loss", "log_throughput"),
        *("log_params_norm", "log_timers_to_tensorboard", "log_memory_to_tensorboard"),
        *("log_validation_ppl_to_tensorboard", "log_world_size_to_tensorboard", "use_dist_ckpt"),
        *("auto_detect_ckpt_format", "ckpt_fully_parallel_load", "ckpt_assume_constant_structure"),
        *("use_persistent_ckpt_worker", "exit_on_missing_checkpoint", "use_mcore_models", "use_flash_attn"),
        *("manual_gc", "profile", "no_one_logger", "fp16_lm_cross_entropy"),
    }
)
_WITH_OPPOSITE = frozenset({"use_critic", "ckpt_fully_parallel_save", "create_attention_mask_in_dataloader"})
"""``--x`` and ``--no-x``."""
_LISTS = frozenset({"data_path", "profile_ranks", "slime_router_middleware_paths"})
_CHOICES = {"qkv_format": ["thd", "bshd"], "megatron_to_hf_mode": ["raw", "bridge"]}


def add_historical_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of older scripts to ``parser``; their values are ignored."""
    group = parser.add_argument_group("historical", "Accepted for older scripts; no effect.")
    for name, reason in HISTORICAL.items():
        settings: dict[str, Any] = {"default": None, "help": f"Without effect: {reason}."}
        if name in _SWITCHES:
            settings["action"] = "store_true"
        elif name in _WITH_OPPOSITE:
            settings["action"] = argparse.BooleanOptionalAction
        elif name in _LISTS:
            settings["nargs"] = "+"
        elif name in _CHOICES:
            settings["choices"] = _CHOICES[name]
        group.add_argument(flag_of(name), **settings)


def note_historical(args: argparse.Namespace) -> None:
    """Log one line that names the historical flags given; reject values that cannot be ignored."""
    if args.qkv_format == "bshd":
        raise ConfigError("--qkv-format is bshd; slime packs sequences (thd) and has no other layout. Drop the flag.")
    needs_values = get_estimator(args.advantage_estimator).needs_values
    if args.use_critic and not needs_values:
        raise ConfigError(
            f"--use-critic with --advantage-estimator {args.advantage_estimator}, which has no critic. "
            "Use --advantage-estimator ppo, or drop --use-critic."
        )
    if args.use_critic is False and needs_values:
        raise ConfigError(
            f"--use-critic is false, and --advantage-estimator {args.advantage_estimator} needs a critic's values. "
            "Choose an estimator without a critic, such as grpo, or drop it."
        )
    given = [name for name in HISTORICAL if getattr(args, name) is not None]
    if given:
        reasons = "; ".join(f"{flag_of(name)}: {HISTORICAL[name]}" for name in given)
        logger.info("Flags without effect: %s", reasons)


_NO_ALIGNMENT = "DeepGEMM is not used in the trainer's forward pass yet"
NOT_YET: dict[str, tuple[Any, str]] = {
    "qwen_gdn_backend": ("fla", "delta nets run by fla or plain torch"),
    "megatron_deepgemm_forward_layers": (None, _NO_ALIGNMENT),
    "megatron_deepgemm_forward_modules": (None, _NO_ALIGNMENT),
    "megatron_deepgemm_moe_forward_layers": (None, _NO_ALIGNMENT),
    "megatron_deepgemm_moe_forward_modules": (None, _NO_ALIGNMENT),
}
"""Attribute of args -> the value that requests nothing, and why other values are rejected."""


def refuse_missing_features(args: Namespace) -> None:
    """Reject flags of features that do not exist yet.

    Raises:
        ConfigError: names every such flag with its value.
    """
    lines = [
        f"{flag_of(name)} is {getattr(args, name)!r}: {reason}. Leave the flag out."
        for name, (nothing, reason) in NOT_YET.items()
        if getattr(args, name) != nothing
    ]
    if lines:
        raise ConfigError("\n".join(lines))


GROUP = FlagGroup(add_historical_arguments)
