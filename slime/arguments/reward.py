"""Flags of rewards."""

from __future__ import annotations

import argparse


def add_reward_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the reward group to ``parser``."""
    group = parser.add_argument_group("reward", "How a response is graded.")
    group.add_argument(
        "--rm-type",
        default=None,
        help="Built-in grader: remote_rm, deepscaler, dapo, math, f1, gpqa, ifbench or random; the prefix boxed_ "
        "grades the boxed answer. A row's metadata may name its own.",
    )
    group.add_argument("--rm-url", default=None, help="Address of the remote grader or teacher.")
    group.add_argument("--reward-key", default=None, help="Entry of a dict reward that is trained on.")
    group.add_argument(
        "--eval-reward-key", default=None, help="Entry of a dict reward that eval reports. Default: --reward-key."
    )
    group.add_argument("--group-rm", action="store_true", help="Grade all responses to a prompt in one call.")
