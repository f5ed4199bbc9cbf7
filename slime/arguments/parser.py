"""One parser for the flags of slime, Megatron and SGLang together."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from slime.arguments.algorithm import add_algorithm_arguments
from slime.arguments.cluster import add_cluster_arguments
from slime.arguments.data import add_data_arguments
from slime.arguments.debug import add_debug_arguments
from slime.arguments.distillation import add_distillation_arguments
from slime.arguments.eval import add_eval_arguments
from slime.arguments.fault_tolerance import add_fault_tolerance_arguments
from slime.arguments.historical import add_historical_arguments
from slime.arguments.hook_flags import add_hook_arguments
from slime.arguments.observability import add_observability_arguments
from slime.arguments.reward import add_reward_arguments
from slime.arguments.rollout import add_rollout_arguments
from slime.arguments.train import add_train_arguments
from slime.arguments.unknown_flags import is_flag, nearest, note_repeated, refuse_unknown
from slime.arguments.weight_sync import add_weight_sync_arguments
from slime.utils.errors import ConfigError

__all__ = [
    "ENGINE_FLAGS",
    "ENGINE_PREFIXES",
    "AddArguments",
    "Parser",
    "add_slime_arguments",
    "build_parser",
    "engine_flags_are_idle",
    "is_flag",
    "nearest",
    "note_repeated",
    "refuse_unknown",
    "reset_arg",
    "split_engine_flags",
]

AddArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]

ENGINE_PREFIXES = ("--sglang-", "--router-")
"""Flags of the engines and of their router; other code may not use these prefixes."""
ENGINE_FLAGS = ("--prefill-num-servers",)
"""Flags of the engines without the prefix."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are ConfigErrors, and which never guesses an abbreviated flag."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        # argparse takes -1 for a value, but -1e-6 for a flag.
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise ConfigError(message)


def add_slime_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag that slime itself owns to ``parser``."""
    add_cluster_arguments(parser)
    add_train_arguments(parser)
    add_rollout_arguments(parser)
    add_data_arguments(parser)
    add_eval_arguments(parser)
    add_algorithm_arguments(parser)
    add_distillation_arguments(parser)
    add_reward_arguments(parser)
    add_fault_tolerance_arguments(parser)
    add_weight_sync_arguments(parser)
    add_hook_arguments(parser)
    add_observability_arguments(parser)
    add_debug_arguments(parser)
    add_historical_arguments(parser)


def build_parser(*, with_engine_flags: bool, add_custom_arguments: AddArguments | None = None) -> Parser:
    """The merged parser: slime's flags, Megatron's, SGLang's (when asked for), and the caller's own."""
    # The flag files of the two backends need their libraries; everything else of this package does without.
    from slime.backends.megatron_utils.arguments import add_megatron_arguments

    parser = Parser(prog="train.py", description="Reinforcement learning post-training with Megatron and SGLang.")
    add_slime_arguments(parser)
    add_megatron_arguments(parser)
    if with_engine_flags:
        from slime.backends.sglang_utils.arguments import add_sglang_arguments

        add_sglang_arguments(parser)
    if add_custom_arguments is not None:
        add_custom_arguments(parser)
    return parser


def reset_arg(parser: argparse.ArgumentParser, name: str, **kwargs: Any) -> None:
    """Add the flag ``name``; when it exists already, change only its default, type and choices."""
    action = parser._option_string_actions.get(name)
    if action is None:
        parser.add_argument(name, **kwargs)
        return
    for key in ("default", "type", "choices", "help"):
        if key in kwargs:
            setattr(action, key, kwargs[key])


def engine_flags_are_idle(argv: Sequence[str]) -> bool:
    """True when the command starts no engine, so that the engines' flags need not be understood."""
    names = {token.split("=", 1)[0] for token in argv}
    return bool(names & {"--debug-train-only", "--load-debug-rollout-data"})


def split_engine_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """``argv`` without the engines' flags and their values, and the names of the flags left out."""
    kept: list[str] = []
    left_out: list[str] = []
    skipping = False
    for token in argv:
        if is_flag(token):
            name = token.split("=", 1)[0]
            skipping = name.startswith(ENGINE_PREFIXES) or name in ENGINE_FLAGS
            if skipping:
                left_out.append(name)
        if not skipping:
            kept.append(token)
    return kept, left_out
