"""What follows from ``--prompt-data verifiers:NAME`` and ``taskset:NAME``, and their flags."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator

from slime.flags.group import FlagGroup
from slime.flags.kinds import wait_s
from slime.utils.env import agent_setting

PREFIXES = ("verifiers:", "verifiers-eval:")
"""Of an environment's rows for training, and of those held out."""
VERIFIERS = "slime.rollout.verifiers_env.generate"
"""Generate function of their rows."""
TASKSET = "taskset:"
PLAY_TASKS = "slime.ext.agent.tasksets.generate"
PYTHON = "VERIFIERS_PYTHON"
"""Setting with the interpreter; behind SLIME_AGENT_."""


def needs_python(path: str) -> str:
    """Return the message for tasks without an interpreter."""
    return (
        f"--prompt-data {path} needs the variable SLIME_AGENT_{PYTHON}: a Python with verifiers 0.4 or later, such as "
        "the bin/python of a virtual environment."
    )


def add_agent_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the agents group to ``parser``."""
    group = parser.add_argument_group("agents", "Tasks that agents play.")
    group.add_argument(
        "--taskset-timeout-s",
        type=wait_s,
        default=3600.0,
        help="Seconds for one task of --prompt-data taskset:NAME, turns of the policy included.",
    )


def derive_verifiers(args: Namespace) -> None:
    """Have environments of the package verifiers read and played."""
    args.prompt_readers = args.prompt_readers | dict.fromkeys(
        PREFIXES, "slime.ext.agent.verifiers_data.read_environment"
    )
    args.prompt_readers = args.prompt_readers | {TASKSET: "slime.ext.agent.tasksets.read_tasks"}
    if args.custom_generate_function_path is None:
        if str(args.prompt_data).startswith(PREFIXES):
            args.custom_generate_function_path = VERIFIERS
        elif str(args.prompt_data).startswith(TASKSET):
            args.custom_generate_function_path = PLAY_TASKS


def check_verifiers(args: Namespace) -> Iterator[str]:
    """Yield a message for tasks without an interpreter, and environments in a mixture, whose rows nothing plays."""
    is_played = args.runs_here and any(source["path"].startswith(TASKSET) for source in args.prompt_sources)
    if is_played and agent_setting(PYTHON) is None:
        yield needs_python(args.prompt_data)
    if args.custom_generate_function_path is not None or not args.runs_here:
        return
    environments = [
        source["path"] for source in args.prompt_sources if source["path"].startswith((*PREFIXES, TASKSET))
    ]
    if environments:
        yield (
            f"--prompt-data {args.prompt_data}: {environments[0]} is an environment, and nothing plays the rows of "
            "those in a mixture; where all data sets are environments, give --custom-generate-function-path "
            f"{VERIFIERS if environments[0].startswith(PREFIXES) else PLAY_TASKS}."
        )


GROUP = FlagGroup(add_agent_arguments, derive=(derive_verifiers,), check=(check_verifiers,))
