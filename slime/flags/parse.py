"""Flags -> a complete Namespace: parse, overlay, derive, check.

    args = parse_args()

``args`` is a plain, mutable, deep-copyable Namespace with upstream's attribute names; plug-ins may set attributes on
it.  slime writes to it only here; facts that only the running job knows go through ``record_runtime``.  The order:

1. one parser for slime's, Megatron's and SGLang's flags; an unknown flag is an error that names the nearest known one
   (words.py),
2. ``--custom-config-path`` and ``--megatron-config-path`` override flags (overlay.py),
3. flags of missing features are rejected, historical ones are logged (historical.py),
4. values are derived, then those of Megatron and SGLang; for a critic too (critic.py),
5. combinations are checked, then files (files.py) and plug-ins (hook_checks.py), before any GPU is used.

Flags come in groups, which derive values and check combinations: the core's are ``GROUPS``, and ``slime.compose`` adds
those of extensions.
"""

from __future__ import annotations

import argparse
import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from slime.flags import (
    algorithm,
    cluster,
    critic,
    data,
    debug,
    evaluation,
    fault_tolerance,
    historical,
    hooks,
    observability,
    reward,
    rollout,
    security,
    train,
    weight_sync,
)
from slime.flags.cluster import RUNTIME_FACTS
from slime.flags.files import check_files
from slime.flags.group import FlagGroup, advise_all, complete_all, declare_all, derive_all, problems_of
from slime.flags.historical import note_historical, refuse_missing_features
from slime.flags.hook_checks import check_hooks_on_driver
from slime.flags.overlay import ROLES_FLAG, apply_overlay, load_role_overrides, overlaid_names, set_overrides
from slime.flags.parser import Parser
from slime.flags.words import engine_flags_are_idle, note_repeated, refuse_unknown, split_engine_flags
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

AddArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]


GROUPS = tuple(
    module.GROUP
    for module in (
        *(cluster, security, train, rollout, data, evaluation, algorithm, reward, weight_sync),
        *(fault_tolerance, hooks, observability, debug, historical, critic),
    )
)
"""The core's groups, in the order in which they are declared, derived and checked."""


def parse_args(
    add_custom_arguments: AddArguments | None = None,
    argv: Sequence[str] | None = None,
    *,
    groups: Sequence[FlagGroup] = GROUPS,
) -> Namespace:
    """Return the command line as a complete, checked Namespace.

    Args:
        add_custom_arguments: function that adds a driver's own flags to the parser.
        argv: the words after the program's name; default ``sys.argv[1:]``.
        groups: slime's flag groups; ``slime.compose.flag_groups()`` includes those of extensions.

    Raises:
        SlimeError: a flag, file, combination or plug-in is invalid; the entry points print it and exit with code 2.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args, parser = _parse(words, add_custom_arguments, groups)
    parsed = dict(vars(args))
    slime_validate_args(args, parser)
    for check in backend_checks(args, groups):
        check(args)
    laid_over = overlaid_names(args.custom_config_path, args.megatron_config_path)
    args.value_origins = _value_origins(vars(args), parsed, parser, words, laid_over)
    return args


def _value_origins(
    final: Mapping[str, Any], parsed: Mapping[str, Any], parser: Parser, words: Sequence[str], laid_over: set[str]
) -> dict[str, str]:
    """Return attribute -> "flag", "yaml" or "derived", for attributes that differ from the default of their flag."""
    flags = parser._option_string_actions
    given = {flags[flag].dest for word in words if (flag := word.partition("=")[0]) in flags}
    defaults = parser.defaults()
    origins: dict[str, str] = {}
    for name, value in final.items():
        if name in laid_over:
            origins[name] = "yaml"
        elif name in given and parsed[name] is value:
            origins[name] = "flag"
        elif value is not (default := defaults.get(name)) and str(value) != str(default):
            origins[name] = "derived"
    return origins


def parse_flags(argv: Sequence[str], *, groups: Sequence[FlagGroup] = GROUPS) -> Namespace:
    """Return the flags as they were given, before anything is derived or checked."""
    return _parse(argv, None, groups)[0]


def _parse(
    argv: Sequence[str], add_custom_arguments: AddArguments | None, groups: Sequence[FlagGroup]
) -> tuple[Namespace, Parser]:
    idle = engine_flags_are_idle(argv)
    words, left_out = split_engine_flags(argv) if idle else (list(argv), [])
    parser = build_parser(with_engine_flags=not idle, add_custom_arguments=add_custom_arguments, groups=groups)
    args, leftover = parser.parse_known_args(words)
    refuse_unknown(parser, words, leftover)
    note_repeated(parser, words)
    if left_out:
        logger.info("Ignored, because no engine runs: %s", " ".join(dict.fromkeys(left_out)))
    return args, parser


def build_parser(
    *,
    with_engine_flags: bool,
    with_trainer_flags: bool = True,
    add_custom_arguments: AddArguments | None = None,
    groups: Sequence[FlagGroup] = GROUPS,
) -> Parser:
    """Return one parser for the flags of ``groups``, of Megatron and SGLang (if requested), and of the caller."""
    parser = Parser(
        groups, prog="train.py", description="Reinforcement learning post-training with Megatron and SGLang."
    )
    if with_trainer_flags:  # from megatron-core's own dataclasses
        from slime.backends.megatron_utils import arguments as trainer_flags

        trainer_flags.add_megatron_arguments(parser)
        parser.no_flags |= trainer_flags.reasons()
    if with_engine_flags:  # from the installed SGLang
        from slime.backends.sglang_utils import arguments as engine_flags

        engine_flags.add_sglang_arguments(parser)
        parser.no_flags |= engine_flags.reasons()
    if add_custom_arguments is not None:
        add_custom_arguments(parser)
    return parser


def parser_of(args: Namespace, groups: Sequence[FlagGroup] = GROUPS) -> Parser:
    """Return a parser for the flags of ``args``, if their own parser is not available."""
    return build_parser(
        with_engine_flags="sglang_server_concurrency" in vars(args),
        with_trainer_flags="num_layers" in vars(args),
        groups=groups,
    )


def reset_arg(parser: argparse.ArgumentParser, name: str, **kwargs: Any) -> None:
    """Add the flag ``name``; if it exists already, change only its default, type and choices."""
    action = parser._option_string_actions.get(name)
    if action is None:
        parser.add_argument(name, **kwargs)
        return
    for key in ("default", "type", "choices", "help"):
        if key in kwargs:
            setattr(action, key, kwargs[key])


def get_slime_extra_args_provider(
    add_custom_arguments: AddArguments | None = None, *, groups: Sequence[FlagGroup] = GROUPS
) -> AddArguments:
    """Return a function that adds slime's own flags, then the caller's, to a parser and returns it."""

    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        declare_all(parser, groups)
        if add_custom_arguments is not None:
            parser = add_custom_arguments(parser) or parser
        return parser

    return provider


def slime_validate_args(args: Namespace, parser: Parser | None = None) -> None:
    """Apply YAML overrides to ``args``, derive values, and check everything.

    Args:
        args: the flags; changed in place.
        parser: their parser, which also checks the values of YAML files; default: a parser of the core's flags.

    Raises:
        ConfigError: lists every invalid combination, or names the first invalid file.
        DataError: a data file is malformed.
        HookError: a plug-in cannot be imported or does not match its call.
    """
    parser = parser or parser_of(args)
    apply_overlay(args, parser)
    # Before the actor's overrides: every role starts from the command line.
    critic_args = critic.critic_flags(args, parser)
    set_overrides(args, "actor", load_role_overrides(args.megatron_config_path).get("actor", {}), parser)
    note_historical(args)
    refuse_missing_features(args)
    derive_all(args, parser.groups)
    args.critic_args = None
    if args.use_critic and not args.debug_rollout_only:
        critic.resolve_critic(critic_args, args, parser.groups)
        args.critic_args = critic_args
    elif critic_args.role_overrides:
        logger.info("%s: there is no critic, so its overrides are not used.", ROLES_FLAG)
    if problems := problems_of(args, parser.groups):
        raise ConfigError("\n".join(problems))
    advise_all(args, parser.groups)
    if args.runs_here:
        check_files(args)
        critic.check_critic_files(args)
    check_hooks_on_driver(args)


def backend_checks(args: Namespace, groups: Sequence[FlagGroup]) -> Iterator[Callable[[Namespace], None]]:
    """Yield the checks of the run's backends, which also derive values from the backends' flags.

    A backend's modules are imported only if the run has it.
    """
    if not args.debug_rollout_only:
        yield partial(_check_trainer, groups=groups)
    if not args.debug_train_only:
        from slime.backends.sglang_utils.arguments import validate_sglang_arguments
        from slime.flags.family_checks import check_engines_of_family

        yield from (validate_sglang_arguments, check_engines_of_family)


def _check_trainer(args: Namespace, groups: Sequence[FlagGroup]) -> None:
    from slime.backends.megatron_utils.arguments import check_taken_up, validate_megatron_arguments

    validate_megatron_arguments(args)
    complete_all(args, groups)
    check_taken_up(args)
    if args.critic_args is not None:
        validate_megatron_arguments(args.critic_args)
        complete_all(args.critic_args, groups)
        check_taken_up(args.critic_args)
        critic.set_always(args.critic_args, critic.ALWAYS_OF_ITS_MODEL)
        critic.check_critic_layout(args)


def record_runtime(args: Namespace, **facts: Any) -> None:
    """Set attributes of ``args`` and the critic's args that only the running job knows, such as a router's address.

    Raises:
        ConfigError: a name is not in ``RUNTIME_FACTS``; add it there first.
    """
    if unknown := sorted(set(facts) - RUNTIME_FACTS):
        raise ConfigError(
            f"record_runtime does not know {', '.join(unknown)}; the facts it records are RUNTIME_FACTS of "
            "slime/flags/cluster.py."
        )
    for role_args in (args, args.critic_args):
        if role_args is not None:
            for name, value in facts.items():
                setattr(role_args, name, value)


def args_to_resume(
    args: Namespace, *, weight_version: int, checkpoint: int | None, copied: int | None = None
) -> Namespace:
    """Return the args of a trainer that replaces another one of the same run.

    Args:
        args: the run's args; not changed.
        weight_version: version of the last push, from which the new trainer continues to count.
        checkpoint: checkpoint of this run from which the new trainer continues; None starts it like the first one.
        copied: rollout after which its ranks already have their state and read no checkpoint.
    """
    resumed = Namespace(**vars(args))
    resumed.update_weight_start_version = weight_version
    if copied is not None:
        resumed.start_rollout_id = copied + 1
    elif checkpoint is not None:
        resumed.earlier_load = None if args.finetune else args.load
        resumed.load = args.save
        resumed.ckpt_step = checkpoint
        resumed.finetune = False
        resumed.no_load_optim = args.no_save_optim and train.keeps_moments(args)
        resumed.no_load_rng = False
        resumed.start_rollout_id = None
    return resumed
