"""Flags of the engines' health monitor."""

from __future__ import annotations

import argparse

from slime.arguments.kinds import positive_float


def add_fault_tolerance_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the fault tolerance group to ``parser``."""
    group = parser.add_argument_group("fault tolerance", "What happens when an engine dies.")
    group.add_argument(
        "--use-fault-tolerance", action="store_true", help="Watch the engines and start dead ones again."
    )
    group.add_argument(
        "--rollout-health-check-interval", type=positive_float, default=30.0, help="Seconds between two checks."
    )
    group.add_argument(
        "--rollout-health-check-timeout", type=positive_float, default=30.0, help="Seconds an engine has to answer."
    )
    group.add_argument(
        "--rollout-health-check-first-wait", type=float, default=0.0, help="Seconds of grace after each resume."
    )
