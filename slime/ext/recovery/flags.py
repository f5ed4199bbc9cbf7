"""Flags of what starts again after a failure."""

from __future__ import annotations

import argparse

from slime.flags.group import FlagGroup


def add_recovery_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the recovery group to ``parser``."""
    group = parser.add_argument_group("recovery", "Restarts of the driver.")
    group.add_argument(
        "--supervise",
        action="store_true",
        help="Start the driver again when it fails, from a process of its own; it goes on from the last save.",
    )


GROUP = FlagGroup(add_recovery_arguments)
