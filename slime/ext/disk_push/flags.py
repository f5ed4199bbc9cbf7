"""Flags of changes that travel over a shared disk."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator

from slime.ext.disk_push.delta import new_checksum
from slime.flags.group import FlagGroup
from slime.utils.errors import ConfigError


def add_disk_push_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the weight change group to ``parser``."""
    group = parser.add_argument_group("weight changes", "What --update-weight-mode delta writes.")
    group.add_argument(
        "--update-weight-delta-encoding",
        choices=["xor", "overwrite"],
        default="xor",
        help="Encoding of changed bytes.",
    )
    group.add_argument(
        "--update-weight-delta-checksum",
        choices=["xxh3-128", "blake3", "adler32"],
        default="xxh3-128",
        help="Checksum that verifies the weights after a delta is applied.",
    )


def check_idle_flags(args: Namespace) -> Iterator[str]:
    """Yield a message for each flag of changes where none are sent."""
    for name, default in (("encoding", "xor"), ("checksum", "xxh3-128")):
        value = getattr(args, f"update_weight_delta_{name}")
        if value != default and args.update_weight_mode != "delta":
            yield f"--update-weight-delta-{name} is {value}, which has no effect without --update-weight-mode delta."


def check_delta_checksum(args: Namespace) -> Iterator[str]:
    """Yield a message for a checksum of deltas whose package is missing."""
    if args.update_weight_mode == "delta":
        try:
            new_checksum(args.update_weight_delta_checksum)
        except ConfigError as error:
            yield f"{error}."


GROUP = FlagGroup(add_disk_push_arguments, check=(check_idle_flags, check_delta_checksum))
