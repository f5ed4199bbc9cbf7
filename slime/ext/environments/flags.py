"""Flags of conversations with tools and environments, and of tasks of reasoning-gym."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator

from slime.flags.group import FlagGroup
from slime.flags.kinds import file_path
from slime.isolation.view import check_local_sandbox
from slime.rollout.mixture import sources_of
from slime.utils.errors import ConfigError

GYM = "gym:"
"""Prefix of a task of reasoning-gym in the place of a prompt file."""
MULTI_TURN = "slime.rollout.multi_turn.generate"
"""Generate function of ``--rollout-tools`` and ``--rollout-environment``."""


def add_environment_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the environments group to ``parser``."""
    group = parser.add_argument_group("environments", "Conversations of the policy with tools and environments.")
    group.add_argument(
        "--rollout-tools",
        type=file_path,
        nargs="+",
        metavar="PATH",
        help="Python functions that the policy may call; annotations and docstring become their description.",
    )
    group.add_argument(
        "--rollout-environment",
        type=file_path,
        metavar="PATH",
        help="Class of an environment of text: reset(seed, options) and step(action), as Gymnasium has them.",
    )


def derive_turns(args: Namespace) -> None:
    """Have tools and environments played by the stock function where no other is named, and tasks read."""
    args.prompt_readers = args.prompt_readers | {GYM: "slime.ext.environments.gym.read_task"}
    if (args.rollout_tools or args.rollout_environment) and args.custom_generate_function_path is None:
        args.custom_generate_function_path = MULTI_TURN


def check_gym(args: Namespace) -> Iterator[str]:
    """Yield a message where nothing isolates the scorers of tasks, which evaluate what the policy wrote."""
    if args.prompt_data is None or not args.runs_here:
        return
    if any(source["path"].startswith(GYM) for source in sources_of(args.prompt_data)):
        try:
            check_local_sandbox(args)
        except ConfigError as error:
            yield str(error)


GROUP = FlagGroup(add_environment_arguments, derive=(derive_turns,), check=(check_gym,))
