"""Flags of int4 quantization-aware training, and checks of those of FP8, which are Megatron's."""

from __future__ import annotations

import argparse
from argparse import Namespace

from slime.flags.group import FlagGroup
from slime.flags.kinds import positive_int
from slime.utils import env
from slime.utils.errors import ConfigError


def add_low_precision_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the low precision group to ``parser``."""
    group = parser.add_argument_group("low precision", "Training for engines that hold weights in few bits.")
    group.add_argument(
        "--int4-qat",
        action="store_true",
        help="Quantization-aware training: weights that engines hold in packed int4 are rounded to it in the forward "
        "pass, with straight-through gradients. OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1 is the same.",
    )
    group.add_argument(
        "--int4-qat-group-size",
        type=positive_int,
        help="Columns that share a scale. Default: OPEN_TRAINING_INT4_GROUP_SIZE, that of --hf-checkpoint, or 128.",
    )
    group.add_argument(
        "--int4-qat-dense",
        action="store_true",
        help="Round all linear layers that tools/convert_hf_to_int4_direct.py quantizes, not only routed experts. An "
        "int4 --hf-checkpoint decides by itself.",
    )


def complete_int4(args: Namespace) -> None:
    """Fill in what the flags, the environment and the checkpoint say, and compare it with the layout.

    Raises:
        ConfigError: they disagree, or the checkpoint is quantized in another way.
    """
    if args.int4_qat is None:
        return  # a tool that trains nothing
    if args.int4_qat or env.int4_fake_qat():
        from slime.ext.low_precision.selection import check_layout, group_size

        size = group_size(args.int4_qat_group_size, args.hf_checkpoint, is_served=not args.debug_train_only)
        args.int4_qat, args.int4_qat_group_size = True, size
        check_layout(args)
        return
    for flag, value in (
        ("--int4-qat-group-size", args.int4_qat_group_size),
        ("--int4-qat-dense", args.int4_qat_dense),
    ):
        if value:
            raise ConfigError(f"{flag} is given without --int4-qat, so nothing would be rounded; add it.")


def complete_fp8(args: Namespace) -> None:
    """Say whether linear layers are trained in FP8; refuse blocks that engines do not have.

    Raises:
        ConfigError: with the flag, its value and what is allowed.
    """
    args.trains_in_fp8 = bool(args.fp8)
    if not args.trains_in_fp8:
        return
    if args.fp8 != "e4m3" or args.fp8_recipe != "blockwise":
        raise ConfigError(
            f"--fp8-format is {args.fp8} and --fp8-recipe {args.fp8_recipe}; slime trains in FP8 with the scales of "
            "FP8 checkpoints: --fp8-format e4m3 --fp8-recipe blockwise."
        )
    if args.fp16:
        raise ConfigError("--fp8-format is given with --fp16; what is not quantized is bf16: give --bf16.")
    from slime.weights.quantize.block_fp8 import DEFAULT_BLOCK

    groups, tensor_size, block = args.num_query_groups, args.tensor_model_parallel_size, DEFAULT_BLOCK[0]
    if not args.multi_latent_attention and tensor_size > groups and args.kv_channels % block:
        raise ConfigError(
            f"--fp8-format is given with --tensor-model-parallel-size {tensor_size} and {groups} groups of heads "
            f"(--num-query-groups) of {args.kv_channels} (--kv-channels): a rank would hold a part of a group, whose "
            f"blocks of {block} rows are not those of the engines; give --tensor-model-parallel-size {groups} or less."
        )


GROUP = FlagGroup(add_low_precision_arguments, complete=(complete_int4, complete_fp8))
