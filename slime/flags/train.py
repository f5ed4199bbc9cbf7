"""Training: precision, memory, trained parameters.

The model's shape and the parallel layout are Megatron's flags, added by ``slime.backends.megatron_utils.arguments``.
"""

from __future__ import annotations

import argparse
import logging
import re
from argparse import Namespace
from collections.abc import Iterator

from slime.flags.checkpoint import add_checkpoint_arguments, advise_saves, derive_starting_point
from slime.flags.cluster import is_for_cuda
from slime.flags.group import FlagGroup, flag_of
from slime.flags.kinds import (
    environment,
    file_path,
    non_negative_float,
    non_negative_int,
    positive_int,
    positive_int_or_minus_one,
    seed,
)

logger = logging.getLogger(__name__)


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the training, checkpoint and multi-token-prediction groups to ``parser``."""
    _add_backend(parser)
    add_checkpoint_arguments(parser)
    _add_parameters(parser)
    _add_mtp(parser)
    _add_alignment(parser)


def _add_backend(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training", "The trainer's processes, precision and memory.")
    group.add_argument("--train-backend", choices=["megatron"], default="megatron", help="Training framework.")
    group.add_argument(
        "--fp32",
        action="store_true",
        help="Train in fp32. Default without --fp32, --bf16 or --fp16: bf16 with CUDA, fp32 without.",
    )
    group.add_argument("--seed", type=seed, default=1234, help="Seed of the trainer, and the base of the engines'.")
    group.add_argument(
        "--lr", type=non_negative_float, default=1e-6, help="Learning rate (its peak, with a schedule)."
    )
    group.add_argument(
        "--clip-grad",
        type=non_negative_float,
        default=1.0,
        help="Clip the global gradient norm to this value; 0: off.",
    )
    group.add_argument(
        "--reset-optimizer-states",
        action="store_true",
        help="Zero the optimizer's moments before the steps of each rollout.",
    )
    group.add_argument(
        "--qwen-gdn-backend",
        choices=["fla", "flashqla"],
        default="fla",
        help="Kernels of Qwen3-Next's gated delta net; plain torch if they are not installed.",
    )
    group.add_argument(
        "--train-env-vars",
        type=environment,
        default={},
        metavar="JSON",
        help="JSON object of environment variables for the trainer's processes.",
    )
    group.add_argument(
        "--recompute-loss-function",
        action="store_true",
        help="Recompute the loss in the backward pass instead of keeping its activations.",
    )
    group.add_argument(
        "--log-probs-chunk-size",
        type=positive_int_or_minus_one,
        default=-1,
        help="Tokens per chunk of the log-prob computation, which bounds its fp32 memory; -1: as many as fit into "
        "256 MiB.",
    )
    group.add_argument(
        "--allgather-cp",
        action="store_true",
        help="Contiguous context-parallel slices with gathered keys and values (DeepSeek sparse attention only).",
    )
    group.add_argument("--padded-vocab-size", type=positive_int, help="Rows of the embedding, including padding.")
    group.add_argument(
        "--data-pad-size-multiplier",
        type=positive_int,
        default=128,
        help="Pad packed micro-batches to a multiple of this many tokens times the tensor-parallel size.",
    )
    group.add_argument(
        "--megatron-config-path",
        type=file_path,
        metavar="YAML",
        help="YAML file of flags by role: `megatron: [{name, role: actor|critic, overrides: {attribute: value}}]`.",
    )
    group.add_argument(
        "--keep-old-actor",
        action="store_true",
        help="Keep a copy of the policy that generated the rollout, to compute its log-probs.",
    )


def _add_parameters(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "trained parameters", "Parameters to train, by patterns searched in their names."
    )
    group.add_argument(
        "--only-train-params-name-list",
        nargs="*",
        metavar="REGEX",
        help="Train only parameters whose names match one of these patterns; freeze the others.",
    )
    group.add_argument(
        "--freeze-params-name-list",
        nargs="*",
        metavar="REGEX",
        help="Freeze parameters whose names match one of these patterns. Not with --only-train-params-name-list.",
    )
    group.add_argument(
        "--freeze-indexer", action="store_true", help="Freeze the indexer of DeepSeek sparse attention."
    )


def _add_mtp(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("multi-token prediction", "Layers that predict more than one token ahead.")
    group.add_argument(
        "--mtp-num-layers", type=non_negative_int, help="Layers of multi-token prediction to build and load."
    )
    group.add_argument(
        "--mtp-loss-scaling-factor",
        type=non_negative_float,
        default=0.2,
        help="Weight of the multi-token prediction loss.",
    )
    group.add_argument(
        "--enable-mtp-training",
        action="store_true",
        help="Train the layers of multi-token prediction; by default they are loaded and frozen.",
    )


def _add_alignment(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "trainer and engine alignment", "Experiments with equal numerics in trainer and engine."
    )
    group.add_argument(
        "--megatron-deepgemm-forward-layers",
        type=non_negative_int,
        nargs="+",
        help="Dense layers (indices) whose forward pass uses DeepGEMM.",
    )
    group.add_argument(
        "--megatron-deepgemm-forward-modules",
        nargs="+",
        help="Suffixes of dense modules whose forward pass uses DeepGEMM.",
    )
    group.add_argument(
        "--megatron-deepgemm-moe-forward-layers",
        type=non_negative_int,
        nargs="+",
        help="Mixture layers (indices) whose forward pass uses grouped DeepGEMM.",
    )
    group.add_argument(
        "--megatron-deepgemm-moe-forward-modules",
        nargs="+",
        help="Suffixes of mixture modules whose forward pass uses grouped DeepGEMM.",
    )


def check_training(args: Namespace) -> Iterator[str]:
    """Yield one message per invalid list of parameter names."""
    for flag in ("only_train_params_name_list", "freeze_params_name_list"):
        for pattern in getattr(args, flag) or []:
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"{flag_of(flag)}: {pattern!r} is no regular expression: {error}."


def keeps_moments(args: Namespace) -> bool:
    """Return True if Adam keeps state between steps; an extension has a stateless variant."""
    return not vars(args).get("use_stateless_adam")


def derive_precision(args: Namespace) -> None:
    """Derive the precision: bf16 with CUDA and fp32 without, unless a flag sets it."""
    if not (args.fp32 or args.bf16 or args.fp16):
        cuda = is_for_cuda(args.runs_here)
        args.bf16 = cuda
        args.fp32 = not cuda
        logger.info(
            "Precision: %s (change it with --fp32, --bf16 or --fp16).", "bf16" if cuda else "fp32, without CUDA"
        )


_OF_SAVES = ("save_interval", "save_hf", "async_save", "keep_last")
GROUP = FlagGroup(
    add_train_arguments,
    derive=(derive_precision, derive_starting_point),
    check=(check_training,),
    advise=(advise_saves,),
    needs=(
        *((name, "save", "that is the folder of the checkpoints") for name in _OF_SAVES),
        ("no_save_optim", "save use_stateless_adam", "no optimizer state would be saved"),
        ("save_hf", "save_interval", "it writes beside each save"),
    ),
    excludes=(("only_train_params_name_list", "freeze_params_name_list", "each says what the other leaves"),),
    once=(derive_starting_point,),
)
