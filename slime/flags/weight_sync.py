"""Weight updates: pushes of new weights from the trainer to the engines."""

from __future__ import annotations

import argparse
from argparse import Namespace

from slime.flags.group import FlagGroup
from slime.flags.kinds import byte_count, positive_int


def add_weight_sync_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the weight update group to ``parser``."""
    group = parser.add_argument_group("weight update", "Pushes of weights to the engines.")
    group.add_argument("--update-weight-buffer-size", type=byte_count, default=512 * 1024**2, help="Bytes per bucket.")
    group.add_argument(
        "--update-weights-interval", type=positive_int, default=1, help="Rollouts between two pushes (train_async.py)."
    )
    group.add_argument(
        "--weight-push-failure",
        choices=["refill", "drop", "stop"],
        help="Handling of an engine that fails a push: refill restarts it with the new weights, drop excludes it for "
        "the rest of the run, stop ends the run. Default: refill with --use-fault-tolerance, else stop.",
    )
    group.add_argument(
        "--check-weight-update-equal",
        action="store_true",
        help="Compare the engines' weights with the trainer's after each push; a difference ends the run.",
    )


def derive_weight_sync(args: Namespace) -> None:
    """Derive the handling of an engine that fails a push: restart it if the run restarts engines."""
    if args.weight_push_failure is None:
        refills = args.use_fault_tolerance and not args.rollout_external
        args.weight_push_failure = "refill" if refills else "stop"
    args.update_weight_start_version = 0


GROUP = FlagGroup(
    add_weight_sync_arguments,
    derive=(derive_weight_sync,),
    needs=(("weight_push_failure=refill", "use_fault_tolerance", "engines are restarted; or use drop or stop"),),
    excludes=(
        (
            "weight_push_failure=refill",
            "rollout_external_engine_addrs",
            "these are not restarted; use drop or stop",
        ),
    ),
)
