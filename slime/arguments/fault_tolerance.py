"""Flags of the engines' health monitor."""

from __future__ import annotations

import argparse
import math

from slime.arguments.kinds import non_negative_float, number_in, positive_float


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
        "--rollout-health-check-first-wait",
        type=non_negative_float,
        default=0.0,
        help="Seconds of grace after each resume.",
    )
    group.add_argument(
        "--rollout-stall-timeout-s",
        type=number_in(0, math.inf),
        default=600.0,
        help="Without fault tolerance: seconds without a token from an engine that is asked for one, after which the "
        "run ends and names it. 0 never ends it.",
    )
