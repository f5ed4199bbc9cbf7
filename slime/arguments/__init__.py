"""Flags -> a complete Namespace: parse, overlay, resolve, validate.

    args = parse_args()

``args`` is a plain, mutable, deep-copyable Namespace with upstream's attribute names; plug-ins may set attributes on
it.  slime itself writes to it here and nowhere else; facts that only the running job knows go through
``record_runtime``.  The order:

1. one parser for slime's, Megatron's and SGLang's flags; an unknown flag is an error that names the nearest known one,
2. ``--custom-config-path`` and ``--megatron-config-path`` are laid over the flags (overlay.py, roles.py),
3. flags whose feature does not exist yet are refused (not_yet.py), historical ones are noted (historical.py),
4. derived values are filled in (resolve.py), then Megatron's and SGLang's own; for a critic too (critic.py),
5. combinations, files and plug-ins are checked (validate.py), before any GPU or engine is taken.
"""

from __future__ import annotations

import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from slime.arguments.critic import check_critic_layout, critic_flags, finish_critic, resolve_critic
from slime.arguments.historical import note_historical
from slime.arguments.not_yet import refuse_missing_features
from slime.arguments.overlay import apply_overlay
from slime.arguments.parser import (
    AddArguments,
    add_slime_arguments,
    build_parser,
    engine_flags_are_idle,
    note_repeated,
    refuse_unknown,
    reset_arg,
    split_engine_flags,
)
from slime.arguments.resolve import resolve
from slime.arguments.roles import apply_role_overrides
from slime.arguments.runtime import args_to_resume, record_runtime
from slime.arguments.validate import validate

__all__ = [
    "args_to_resume",
    "get_slime_extra_args_provider",
    "parse_args",
    "record_runtime",
    "reset_arg",
    "slime_validate_args",
]

logger = logging.getLogger(__name__)


def parse_args(add_custom_arguments: AddArguments | None = None, argv: Sequence[str] | None = None) -> Namespace:
    """The command line as a complete, checked Namespace.

    Args:
        add_custom_arguments: gets the parser, to add a driver's own flags.
        argv: the words after the program's name; default ``sys.argv[1:]``.

    Raises:
        SlimeError: a flag, file, combination or plug-in is wrong; the entry points show it and end with code 2.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = parse_flags(words, add_custom_arguments)
    slime_validate_args(args)
    _validate_backends(args)
    return args


def parse_flags(argv: Sequence[str], add_custom_arguments: AddArguments | None = None) -> Namespace:
    """The flags as they were given, nothing derived or checked yet."""
    idle = engine_flags_are_idle(argv)
    words, left_out = split_engine_flags(argv) if idle else (list(argv), [])
    parser = build_parser(with_engine_flags=not idle, add_custom_arguments=add_custom_arguments)
    args, leftover = parser.parse_known_args(words)
    refuse_unknown(parser, words, leftover)
    note_repeated(parser, words)
    if left_out:
        logger.info("No engine runs, so these flags were not looked at: %s", " ".join(dict.fromkeys(left_out)))
    return args


def slime_validate_args(args: Namespace) -> None:
    """Lay the overlay over ``args``, fill in what is derived, and check the whole."""
    apply_overlay(args)
    critic = critic_flags(args)  # before the actor's overrides: every role starts from the command line
    apply_role_overrides(args)
    note_historical(args)
    refuse_missing_features(args)
    resolve(args)
    args.critic_args = critic if args.use_critic and not args.debug_rollout_only else None
    if args.critic_args is not None:
        resolve_critic(critic, args)
    validate(args)


def get_slime_extra_args_provider(add_custom_arguments: AddArguments | None = None) -> AddArguments:
    """A function that adds slime's own flags, then the caller's, to a parser and returns it."""

    def provider(parser: ArgumentParser) -> ArgumentParser:
        add_slime_arguments(parser)
        if add_custom_arguments is not None:
            parser = add_custom_arguments(parser) or parser
        return parser

    return provider


def _validate_backends(args: Namespace) -> None:
    if not args.debug_rollout_only:
        from slime.backends.megatron_utils.arguments import validate_megatron_arguments

        validate_megatron_arguments(args)
        if args.critic_args is not None:
            validate_megatron_arguments(args.critic_args)
            finish_critic(args.critic_args)
            check_critic_layout(args)
    if not args.debug_train_only:
        from slime.backends.sglang_utils.arguments import validate_sglang_arguments

        validate_sglang_arguments(args)
