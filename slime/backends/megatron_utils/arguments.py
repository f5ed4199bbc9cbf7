"""The trainer's flags: adds them to the parser, derives values from them, and checks them.

``slime.flags.parse`` calls ``add_`` and ``validate_megatron_arguments``; the ``*_config_from_args`` functions build
megatron-core's config objects from the result.
"""

from __future__ import annotations

import argparse

from slime.backends.megatron_utils.flags.check_arguments import check_arguments, check_taken_up
from slime.backends.megatron_utils.flags.config_builders import (
    ddp_config_from_args,
    optimizer_config_from_args,
    transformer_config_from_args,
)
from slime.backends.megatron_utils.flags.config_flags import add_config_flags, reasons
from slime.backends.megatron_utils.flags.hf_config_check import (
    check_hf_config,
    check_other_models,
    fill_model_flags,
    open_model_flags,
)
from slime.backends.megatron_utils.flags.own_flags import add_own_flags
from slime.backends.megatron_utils.flags.resolve_arguments import derived_arguments

__all__ = [
    "add_megatron_arguments",
    "check_taken_up",
    "ddp_config_from_args",
    "fill_model_flags",
    "optimizer_config_from_args",
    "reasons",
    "transformer_config_from_args",
    "validate_megatron_arguments",
]


def add_megatron_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag of the trainer that ``parser`` does not have yet."""
    add_own_flags(parser)
    add_config_flags(parser)
    open_model_flags(parser)


def validate_megatron_arguments(args: argparse.Namespace) -> None:
    """Fill in model flags from config.json, check them against it, derive further values, and check the flags.

    With ``--debug-rollout-only``, when no trainer runs, only the model flags are filled in.

    Raises:
        ConfigError: a flag or a combination of flags is invalid, or contradicts the HF config.
    """
    vars(args).update(fill_model_flags(args))
    if args.debug_rollout_only:
        return
    if args.hf_checkpoint:
        check_hf_config(args)
    vars(args).update(derived_arguments(args))
    check_arguments(args)
    if args.hf_checkpoint:
        check_other_models(args)
