"""Fault tolerance: health checks, restarts of engines, non-finite losses and gradients."""

from __future__ import annotations

import argparse
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence

from slime.flags.config import BackendFlags
from slime.flags.group import FlagGroup
from slime.flags.kinds import wait_s, wait_s_or_zero


def add_fault_tolerance_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the fault tolerance group to ``parser``."""
    group = parser.add_argument_group("fault tolerance", "Health checks, and restarts of engines.")
    group.add_argument(
        "--trainer-hang-timeout-s",
        type=wait_s,
        default=30.0,
        help="Seconds without an answer after which a trainer rank counts as hanging and is treated as dead; also "
        "the seconds by which a micro-batch or optimizer step may exceed twice the longest one so far.",
    )
    group.add_argument(
        "--on-nan",
        nargs="+",
        metavar="stop|skip|rollback N",
        help="Action if a loss or gradient is not finite. stop ends the run; skip omits the step and counts it "
        "(train/skipped_steps); rollback N omits the rollout and goes back N checkpoints, also if ranks that must "
        "hold the same weights do not, which otherwise ends the run. Default: stop; skip with "
        "--no-check-for-nan-in-loss-and-grad.",
    )
    _add_engine_checks(group)


def _add_engine_checks(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the engines' health checks."""
    group.add_argument(
        "--use-fault-tolerance", action="store_true", help="Check the engines' health and restart failed ones."
    )
    group.add_argument(
        "--rollout-health-check-interval",
        type=wait_s,
        default=30.0,
        help="Seconds between two health checks of an engine.",
    )
    group.add_argument(
        "--rollout-health-check-timeout",
        type=wait_s,
        default=30.0,
        help="Seconds that an engine has to answer a health check, and a prefill engine to get its half of a request.",
    )
    group.add_argument(
        "--rollout-health-check-first-wait",
        type=wait_s_or_zero,
        default=0.0,
        help="Seconds without health checks after engines start or resume.",
    )
    group.add_argument(
        "--rollout-stall-timeout-s",
        type=wait_s_or_zero,
        default=600.0,
        help="Without fault tolerance: end the run if a generating engine returns no token for this many seconds. "
        "0: never.",
    )


def derive_fault_tolerance(args: Namespace) -> None:
    """Derive the action for non-finite losses and gradients; by default stop, if the trainer checks for them."""
    if args.on_nan is None:
        args.on_nan = ["stop" if BackendFlags.of(args).check_for_nan_in_loss_and_grad else "skip"]
    if args.on_nan[0] == "skip":
        args.check_for_nan_in_loss_and_grad = False  # megatron-core must not stop where the step is to be skipped


def checkpoints_to_go_back(on_nan: Sequence[str]) -> int:
    """Return N of ``--on-nan rollback N``; 0 without rollback."""
    return int(on_nan[1]) if on_nan[0] == "rollback" else 0


def check_on_nan(args: Namespace) -> Iterator[str]:
    """Yield one message per problem with --on-nan."""
    given = " ".join(args.on_nan)
    if re.fullmatch(r"stop|skip|rollback [1-9][0-9]{0,3}", given) is None:
        yield f"--on-nan {given} is none of stop, skip and rollback N (such as: rollback 1)."
        return
    if given != "skip" and not BackendFlags.of(args).check_for_nan_in_loss_and_grad:
        yield f"--no-check-for-nan-in-loss-and-grad finds nothing for --on-nan {given}; drop one of them."
    back = checkpoints_to_go_back(args.on_nan)
    if back and not args.restarts_trainer:
        yield f"--on-nan {given} goes back by --trainer-recovery checkpoint; give that, or use stop or skip."
    if back and args.keep_last is not None and args.keep_last < back:
        yield f"--on-nan {given} needs as many checkpoints, and --keep-last is {args.keep_last}; raise it."


GROUP = FlagGroup(
    add_fault_tolerance_arguments,
    derive=(derive_fault_tolerance,),
    check=(check_on_nan,),
)
