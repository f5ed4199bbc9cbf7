"""Flags of rewards."""

from __future__ import annotations

import argparse

from slime.arguments.kinds import non_negative_int, positive_float
from slime.rollout.rm_hub.policy import DEFAULT_MAX_FAILURES, DEFAULT_POLICY, DEFAULT_TIMEOUT_S, POLICIES


def add_reward_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the reward group to ``parser``."""
    group = parser.add_argument_group("reward", "How a response is graded.")
    group.add_argument(
        "--rm-type",
        default=None,
        help="Built-in grader: remote_rm, deepscaler, dapo, math, f1, gpqa, ifbench, random or math_verify; the "
        "prefix boxed_ grades the boxed answer. A row's metadata may name its own.",
    )
    group.add_argument("--rm-url", default=None, help="Address of the remote grader or teacher.")
    group.add_argument("--reward-key", default=None, help="Entry of a dict reward that is trained on.")
    group.add_argument(
        "--eval-reward-key", default=None, help="Entry of a dict reward that eval reports. Default: --reward-key."
    )
    group.add_argument("--group-rm", action="store_true", help="Grade all responses to a prompt in one call.")
    group.add_argument(
        "--rm-timeout-s",
        type=positive_float,
        default=DEFAULT_TIMEOUT_S,
        help="Seconds one grading may take, with all tries of the remote grader.",
    )
    group.add_argument(
        "--rm-failure-policy",
        choices=POLICIES,
        default=DEFAULT_POLICY,
        help="What a response gets whose grader hangs, raises or answers nonsense. zero: reward 0; failed: reward 0 "
        "and the status FAILED, and it does not train; raise: the run ends.",
    )
    group.add_argument(
        "--rm-max-failures",
        type=non_negative_int,
        default=DEFAULT_MAX_FAILURES,
        help="End the run when so many gradings in a row have failed; 0 never ends it.",
    )
