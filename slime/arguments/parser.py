"""One parser for the flags of slime, Megatron and SGLang together."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from slime.arguments.groups import GROUPS
from slime.flags.group import FlagGroup
from slime.flags.parser import Parser

AddArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]


def build_parser(
    *,
    with_engine_flags: bool,
    with_trainer_flags: bool = True,
    add_custom_arguments: AddArguments | None = None,
    groups: Sequence[FlagGroup] = GROUPS,
) -> Parser:
    """Return one parser for the flags of ``groups``, Megatron's and SGLang's (when asked for), and the caller's."""
    parser = Parser(
        groups, prog="train.py", description="Reinforcement learning post-training with Megatron and SGLang."
    )
    # The flag files of the two backends need their libraries; everything else of this package does without.
    if with_trainer_flags:
        from slime.backends.megatron_utils.arguments import add_megatron_arguments, reasons

        add_megatron_arguments(parser)
        parser.no_flags |= reasons()
    if with_engine_flags:
        from slime.backends.sglang_utils import arguments as engine_flags

        engine_flags.add_sglang_arguments(parser)
        parser.no_flags |= engine_flags.reasons()
    if add_custom_arguments is not None:
        add_custom_arguments(parser)
    return parser


def parser_of(args: Namespace, groups: Sequence[FlagGroup] = GROUPS) -> Parser:
    """Return a parser of the flags that ``args`` have, for args whose parser is not available."""
    return build_parser(
        with_engine_flags="sglang_server_concurrency" in vars(args),
        with_trainer_flags="num_layers" in vars(args),
        groups=groups,
    )


def reset_arg(parser: argparse.ArgumentParser, name: str, **kwargs: Any) -> None:
    """Add the flag ``name``; when it exists already, change only its default, type and choices."""
    action = parser._option_string_actions.get(name)
    if action is None:
        parser.add_argument(name, **kwargs)
        return
    for key in ("default", "type", "choices", "help"):
        if key in kwargs:
            setattr(action, key, kwargs[key])
