"""Flags of the prompts and of how samples become optimizer steps."""

from __future__ import annotations

import argparse

from slime.arguments.kinds import json_object, positive_int

LOSS_MASK_TYPES = ("qwen", "qwen3", "qwen3_5", "distill_qwen")


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the data and batching groups to ``parser``."""
    _add_prompts(parser)
    _add_batching(parser)


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts", "Where prompts come from and what the columns are called.")
    group.add_argument(
        "--prompt-data",
        default=None,
        metavar="FILE",
        help="Prompts: .jsonl (one JSON object a line) or .parquet; FILE@[a:b] takes rows a to b-1.",
    )
    group.add_argument(
        "--disable-rollout-global-dataset",
        dest="rollout_global_dataset",
        action="store_false",
        default=True,
        help="The rollout function brings its own data; no data set is loaded, and none is saved.",
    )
    group.add_argument("--input-key", default="input", help="Column of the prompt.")
    group.add_argument("--label-key", default=None, help="Column of the label that a reward is computed from.")
    group.add_argument("--metadata-key", default="metadata", help="Column of each row's metadata object.")
    group.add_argument("--tool-key", default="tools", help="Column of each row's tool definitions.")
    group.add_argument(
        "--multimodal-keys",
        type=json_object,
        default=None,
        metavar="JSON",
        help='Columns of images, videos and audio: \'{"image": "images"}\'.',
    )
    group.add_argument(
        "--apply-chat-template", action="store_true", help="Render each prompt with the tokenizer's chat template."
    )
    group.add_argument(
        "--apply-chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help="Extra arguments of the chat template.",
    )
    group.add_argument("--rollout-shuffle", action="store_true", help="Shuffle the prompts anew for each epoch.")
    group.add_argument(
        "--loss-mask-type",
        choices=LOSS_MASK_TYPES,
        default="qwen",
        help="Chat template whose assistant turns SFT trains on.",
    )


def _add_batching(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batching", "How samples are cut into optimizer steps and micro-batches.")
    group.add_argument(
        "--global-batch-size", type=positive_int, default=None, help="Rollouts (samples) of one optimizer step."
    )
    group.add_argument(
        "--num-steps-per-rollout",
        type=positive_int,
        default=None,
        help="Optimizer steps of one rollout; sets --global-batch-size.",
    )
    group.add_argument(
        "--micro-batch-size",
        type=positive_int,
        default=1,
        help="Samples of one micro-batch; without effect under --use-dynamic-batch-size.",
    )
    group.add_argument(
        "--use-dynamic-batch-size",
        action="store_true",
        help="Pack samples into micro-batches by tokens (--max-tokens-per-gpu). Recommended; the loss is the same.",
    )
    group.add_argument(
        "--max-tokens-per-gpu",
        type=positive_int,
        default=None,
        help="Tokens of one micro-batch on one GPU; a longer sample gets a micro-batch of its own.",
    )
    group.add_argument(
        "--balance-data", action="store_true", help="Spread the samples so that data-parallel ranks have equal work."
    )
    group.add_argument(
        "--balance-by-flops",
        action="store_true",
        help="Balance micro-batches by computed FLOPs instead of tokens; needs --use-dynamic-batch-size.",
    )
