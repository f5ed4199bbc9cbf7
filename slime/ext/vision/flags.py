"""Flags of the vision tower that a trainer has."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from slime.flags.group import FlagGroup
from slime.flags.kinds import positive_float
from slime.utils.errors import ConfigError


def add_vision_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the vision group to ``parser``."""
    group = parser.add_argument_group("vision", "The tower that makes embeddings of images, in the trainer's model.")
    group.add_argument(
        "--train-vision-tower", action="store_true", help="Train the vision tower too, which is frozen otherwise."
    )
    group.add_argument(
        "--vision-tower-lr-mult",
        type=positive_float,
        default=1.0,
        help="Factor of the trained vision tower's learning rates: of --lr, --min-lr and all between them.",
    )


def derive_vision(args: Namespace) -> None:
    """Say which parameters have other learning rates, and which tower a plan counts."""
    if args.vision_tower_lr_mult != 1:
        args.lr_factors["*vision_model.*"] = args.vision_tower_lr_mult
    if not args.runs_here:  # a plan has numbers for a run without a trainer, too, and for one that is refused
        _fill_tower(args)


def check_vision(args: Namespace) -> Iterator[str]:
    """Yield one message for each way in which the factor cannot hold."""
    factor = args.vision_tower_lr_mult
    if factor != 1 and not args.train_vision_tower:
        yield f"--vision-tower-lr-mult is {factor:g}, but the tower is frozen; give --train-vision-tower too."
    if factor != 1 and args.lr_warmup_init:
        yield (
            f"--vision-tower-lr-mult is {factor:g} and --lr-warmup-init {args.lr_warmup_init:g}, from which all "
            "parameters would warm up alike; drop one of them."
        )


def complete_vision(args: Namespace) -> None:
    """Say what the model gets, whether it has a tower, and of which sizes, and compare the flags with it.

    Raises:
        ConfigError: the first thing that does not go together.
    """
    args.joins_inputs = args.custom_model_provider_path is not None
    if config := _fill_tower(args):
        from slime.ext.vision.checks import encoder_problems, tower_problems

        for problem in (*tower_problems(args, config), *encoder_problems(args)):
            raise ConfigError(problem)


def _fill_tower(args: Namespace) -> Mapping[str, Any]:
    """Fill in ``has_own_tower`` and ``tower_dims``; return config.json, or nothing where no tower can be.

    What knows of towers is imported only where one may be.
    """
    from slime.backends.megatron_utils.flags.hf_config_check import read_hf_config

    args.has_own_tower = False
    config = read_hf_config(args.hf_checkpoint) if args.hf_checkpoint else {}
    vision = config.get("vision_config")
    is_asked = bool(args.train_vision_tower or args.multimodal_keys)
    if not (vision or is_asked):
        return {}
    from slime.ext.vision.towers import tower_of

    if (tower := tower_of(config, args.spec, is_asked=is_asked)) is not None and vision:
        args.tower_dims = asdict(tower.dims(vision, is_trained=args.train_vision_tower))
        args.has_own_tower = not args.custom_model_provider_path
    return config


GROUP = FlagGroup(add_vision_arguments, derive=(derive_vision,), check=(check_vision,), complete=(complete_vision,))
