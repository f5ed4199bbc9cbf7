"""Flags that choose between the verified and the plain push, and how engines start for the verified one.

For pushes over a disk see ``disk.flags``.
"""

from __future__ import annotations

import argparse
from argparse import Namespace

from slime.ext.fast_push.disk.flags import GROUP as OVER_DISK
from slime.ext.fast_push.disk.flags import add_disk_push_arguments
from slime.ext.fast_push.loaders import WEIGHT_LOADERS
from slime.flags.group import FlagGroup

PLUGIN = "slime.ext.fast_push.sglang_plugin.register"


def add_fast_push_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verified push group to ``parser``."""
    group = parser.add_argument_group(
        "verified push", "Whether engines prove that they hold the weights sent to them."
    )
    group.add_argument(
        "--weight-push",
        choices=["verified", "plain"],
        default="verified",
        help="verified: engines prove that they hold what was sent, and one that fails is excluded. plain: whole "
        "tensors through SGLang's own endpoints; nothing is compared, and an engine's failure fails the push.",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add both groups to ``parser``."""
    add_fast_push_arguments(parser)
    add_disk_push_arguments(parser)


def derive_fast_push(args: Namespace) -> None:
    """Make engines start with the loaders that a verified push needs."""
    if args.weight_push == "verified":
        args.weight_loaders = [*WEIGHT_LOADERS]
        args.engine_plugins.append([PLUGIN])


GROUP = FlagGroup(
    add_arguments,
    derive=(derive_fast_push, *OVER_DISK.derive),
    check=OVER_DISK.check,
    needs=OVER_DISK.needs,
    excludes=(
        ("weight_push=plain", "check_weight_update_equal", "it compares nothing; use --weight-push verified"),
        ("weight_push=plain", "weight_push_failure=drop", "it excludes no engine; use refill, stop, or verified"),
        *OVER_DISK.excludes,
    ),
)
