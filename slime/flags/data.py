"""Data: prompts, batches of optimizer steps, and evaluation data.

Evaluations use the rollout's flags for everything without an evaluation flag.
"""

from __future__ import annotations

import argparse
import logging
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from slime.flags.algorithm import derive_group_size
from slime.flags.config import BackendFlags, FlagConfig
from slime.flags.group import FlagGroup
from slime.flags.kinds import (
    file_path,
    json_object,
    non_negative_float,
    non_negative_int,
    positive_fraction,
    positive_int,
    positive_int_or_minus_one,
    text_map,
)
from slime.flags.rollout import OWN_ROLLOUTS, SFT_ROLLOUT
from slime.flags.words import NO_BATCH

logger = logging.getLogger(__name__)

MAY_GIVE_OTHER_COUNTS = (
    "custom_generate_function_path",
    "custom_convert_samples_to_train_data_path",
    "load_debug_rollout_data",
    "load_forge_rollout_data",
)
"""With one of these flags, the number of samples of a rollout may differ from the one in the flags."""
LOSS_MASK_TYPES = ("qwen", "qwen3", "qwen3_5", "distill_qwen", "any")


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the data and batching groups to ``parser``."""
    _add_prompts(parser)
    _add_batching(parser)


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts", "Prompt files and the names of their columns.")
    parser.set_defaults(prompt_readers={})  # prefix of a --prompt-data that is not a file -> import path of its reader
    group.add_argument(
        "--prompt-data",
        type=file_path,
        metavar="FILE",
        help="Prompts: .jsonl (one JSON object per line) or .parquet; FILE@[a:b] takes rows a to b-1. "
        "NAME/CONFIG@SPLIT: a data set of the Hugging Face hub, such as openai/gsm8k/main@train. "
        "gym:TASK?size=N&seed=N: questions of reasoning-gym, with their scorer. "
        "verifiers:NAME?argument=value: an environment of verifiers, which plays and scores. "
        "FILE.yaml: a mixture of several.",
    )
    group.add_argument(
        "--disable-rollout-global-dataset",
        dest="rollout_global_dataset",
        action="store_false",
        default=True,
        help="Load and save no data set: the rollout function has its own data.",
    )
    group.add_argument("--input-key", default="input", help="Column of the prompt.")
    group.add_argument("--label-key", help="Column of the label, for graders.")
    group.add_argument("--metadata-key", default="metadata", help="Column of the metadata object.")
    group.add_argument("--tool-key", default="tools", help="Column of the tool definitions.")
    group.add_argument(
        "--multimodal-keys",
        type=text_map,
        metavar="JSON",
        help='Columns of images, videos and audio: \'{"image": "images"}\'.',
    )
    group.add_argument(
        "--apply-chat-template",
        action=argparse.BooleanOptionalAction,
        help="Render each prompt with the tokenizer's chat template. Default: on if rows hold chat messages, which "
        "nothing else renders, else off.",
    )
    group.add_argument(
        "--apply-chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help="Additional arguments for the chat template, as JSON.",
    )
    group.add_argument("--rollout-shuffle", action="store_true", help="Shuffle the prompts in each epoch.")
    group.add_argument(
        "--accept-other-data",
        action="store_true",
        help="Resume even if the prompts, --rollout-shuffle or --rollout-seed differ from the checkpoint's. The "
        "position stays the same, so prompts of the epoch may be repeated or skipped.",
    )
    group.add_argument(
        "--loss-mask-type",
        choices=LOSS_MASK_TYPES,
        default="qwen",
        help="Chat format, which SFT uses to find the assistant's turns to train on.",
    )


def _add_batching(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batching", "Sizes of optimizer steps and micro-batches.")
    group.add_argument(
        "--global-batch-size",
        type=positive_int,
        help="Rollouts (samples) per optimizer step. Default: all of a rollout.",
    )
    group.add_argument(
        "--num-steps-per-rollout", type=positive_int, help="Optimizer steps per rollout; sets --global-batch-size."
    )
    group.add_argument(
        "--micro-batch-size",
        type=positive_int,
        default=1,
        help="Samples per micro-batch; no effect with --use-dynamic-batch-size.",
    )
    group.add_argument(
        "--use-dynamic-batch-size",
        action="store_true",
        help="Pack samples into micro-batches by tokens (--max-tokens-per-gpu). Recommended; the loss is the same.",
    )
    group.add_argument(
        "--max-tokens-per-gpu",
        type=positive_int,
        help="Maximum tokens of a micro-batch per GPU; a longer sample forms its own micro-batch.",
    )
    group.add_argument(
        "--balance-data",
        action=argparse.BooleanOptionalAction,
        help="Distribute samples so that data-parallel ranks have equal work. Default: on with --balance-by-flops, "
        "else off.",
    )
    group.add_argument(
        "--balance-by-flops",
        action="store_true",
        help="Balance micro-batches by FLOPs instead of tokens; needs --use-dynamic-batch-size.",
    )


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the evaluation group to ``parser``."""
    group = parser.add_argument_group("evaluation", "Held-out data and its sampling.")
    group.add_argument("--eval-interval", type=positive_int, help="Evaluate every this many rollouts.")
    group.add_argument(
        "--eval-prompt-data",
        nargs="+",
        metavar="NAME PATH",
        help="Pairs of name and file. A single value is the file of a data set called aime.",
    )
    group.add_argument(
        "--eval-config",
        type=file_path,
        metavar="YAML",
        help="YAML file of data sets, each with its own settings: `eval: {defaults: {...}, datasets: [{name, path, "
        "...}]}`.",
    )
    group.add_argument("--skip-eval-before-train", action="store_true", help="Do not evaluate the initial weights.")
    group.add_argument(
        "--eval-in-background",
        action="store_true",
        help="Evaluate while training continues (train_async.py), on the engines of the model named `eval` in "
        "--sglang-config. They get the weights when an evaluation starts.",
    )
    group.add_argument("--eval-input-key", help="Column of the prompt in evaluation data.")
    group.add_argument("--eval-label-key", help="Column of the label in evaluation data.")
    group.add_argument("--eval-tool-key", help="Column of the tool definitions in evaluation data.")
    group.add_argument(
        "--n-samples-per-eval-prompt", type=positive_int, default=1, help="Responses per evaluation prompt."
    )
    group.add_argument(
        "--eval-temperature", type=non_negative_float, help="Sampling temperature of evaluations; 0 is greedy."
    )
    group.add_argument("--eval-top-p", type=positive_fraction, help="Top-p of evaluations, in (0, 1].")
    group.add_argument("--eval-top-k", type=positive_int_or_minus_one, help="Top-k of evaluations; -1: all tokens.")
    group.add_argument("--eval-max-response-len", type=positive_int, help="Maximum tokens of an evaluation response.")
    group.add_argument(
        "--eval-max-prompt-len", type=positive_int, help="Leave out evaluation prompts with more tokens."
    )
    group.add_argument(
        "--eval-min-new-tokens", type=non_negative_int, help="Minimum tokens of an evaluation response."
    )
    group.add_argument(
        "--eval-max-context-len",
        type=positive_int,
        help="Maximum tokens of an evaluation prompt and its response. Default: --rollout-max-context-len.",
    )


@dataclass(frozen=True, kw_only=True)
class BatchConfig(FlagConfig, flags=(add_data_arguments,)):
    """Settings for splitting an optimizer step's samples into micro-batches."""

    use_dynamic_batch_size: bool
    max_tokens_per_gpu: int | None
    micro_batch_size: int
    balance_data: bool
    balance_by_flops: bool


def derive_data(args: Namespace) -> None:
    """Derive the data sets of ``--prompt-data``, the samples per step and the prompts submitted at a time."""
    # Each has its path, and optionally its own keys.
    args.prompt_sources = [] if args.prompt_data is None else [{"path": args.prompt_data}]
    if not args.runs_here:  # rows, which would decide it, are not read
        args.apply_chat_template = bool(args.apply_chat_template)
    if args.balance_data is None:
        args.balance_data = args.balance_by_flops  # balancing micro-batches by FLOPs balances ranks too
    if args.rollout_batch_size is None:
        return
    is_asked = args.num_steps_per_rollout is not None or not args.debug_rollout_only
    if args.global_batch_size is None and is_asked:
        samples = args.rollout_batch_size * args.n_samples_per_prompt
        args.global_batch_size = samples // (args.num_steps_per_rollout or 1)
    if args.over_sampling_batch_size is None:
        args.over_sampling_batch_size = args.rollout_batch_size


def check_batches(args: Namespace) -> Iterator[str]:
    """Yield one message per batch size that is missing or inconsistent with others."""
    if args.rollout_batch_size is None:
        yield NO_BATCH
        return
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    product = f"--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt {args.n_samples_per_prompt}"
    steps, batch = args.num_steps_per_rollout, args.global_batch_size
    is_ours = args.rollout_function_path in (*OWN_ROLLOUTS, SFT_ROLLOUT)
    is_counted = is_ours and not any(getattr(args, name) for name in MAY_GIVE_OTHER_COUNTS)
    if args.over_sampling_batch_size < args.rollout_batch_size:
        yield (
            f"--over-sampling-batch-size {args.over_sampling_batch_size} is below --rollout-batch-size "
            f"{args.rollout_batch_size}; it must be at least as large."
        )
    if args.debug_rollout_only:
        return
    if steps is not None and batch != samples // steps:
        yield (
            f"--global-batch-size {batch} disagrees with --num-steps-per-rollout {steps}: {product} = {samples} "
            f"samples in {steps} steps make {samples // steps} a step. Drop one of the two flags."
        )
    elif batch == 0:
        yield f"--num-steps-per-rollout {steps} is more than the {samples} samples of a rollout ({product})."
    elif steps is not None and samples // batch != steps:
        yield (
            f"--num-steps-per-rollout {steps}: {product} = {samples} samples do not make {steps} equal steps; with "
            f"{batch} in each there would be {samples // batch}. Give that number, or another size of a rollout."
        )
    elif batch > samples and args.load_debug_rollout_data is None:
        yield f"--global-batch-size {batch} is more than the {samples} samples of a rollout ({product})."
    elif (rest := samples % batch) and is_counted:
        asked = f"--global-batch-size {batch}" if steps is None else f"--num-steps-per-rollout {steps}"
        yield (
            f"{asked} does not divide the {samples} samples of a rollout ({product}): {rest} of them would not be "
            f"trained on. Give a divisor of {samples}, or leave the flag out for one step a rollout."
        )
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None:
        yield "--use-dynamic-batch-size needs --max-tokens-per-gpu: say how many tokens a micro-batch may have."
    if args.balance_by_flops and not args.use_dynamic_batch_size:
        yield "--balance-by-flops balances packed micro-batches, so it needs --use-dynamic-batch-size."


def advise_micro_batches(args: Namespace) -> None:
    """Log if samples may exceed a micro-batch, and if --max-tokens-per-gpu has no effect."""
    if args.max_tokens_per_gpu is not None and not args.use_dynamic_batch_size:
        logger.warning("--max-tokens-per-gpu has no effect without --use-dynamic-batch-size.")
    parts = BackendFlags.of(args).context_parallel_size
    if not args.use_dynamic_batch_size or args.debug_rollout_only or args.rollout_max_response_len is None:
        return
    if args.rollout_max_response_len > args.max_tokens_per_gpu * parts:
        logger.warning(
            "--rollout-max-response-len %d is more than the %d tokens of a micro-batch (--max-tokens-per-gpu %d x "
            "--context-parallel-size %d): a longer sample becomes a larger micro-batch, and needs more memory.",
            args.rollout_max_response_len,
            args.max_tokens_per_gpu * parts,
            args.max_tokens_per_gpu,
            parts,
        )


GROUP = FlagGroup(
    add_data_arguments,
    derive=(derive_group_size, derive_data),
    check=(check_batches,),
    advise=(advise_micro_batches,),
)
