"""The choice between the verified and the plain push, and what engines of the verified one are started with."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator

from slime.ext.fast_push.loaders import WEIGHT_LOADERS
from slime.flags.group import FlagGroup

PLUGIN = "slime.ext.fast_push.sglang_plugin.register"


def add_fast_push_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verified push group to ``parser``."""
    group = parser.add_argument_group("verified push", "What engines prove of the weights that they are sent.")
    group.add_argument(
        "--weight-push",
        choices=["verified", "plain"],
        default="verified",
        help="verified: engines prove that they hold what was sent, and one that fails is left out. plain: whole "
        "tensors through SGLang's own endpoints; nothing is compared, and one that fails fails the push.",
    )


def derive_fast_push(args: Namespace) -> None:
    """Have engines start with the loaders that a verified push asks."""
    if args.weight_push == "verified":
        args.weight_loaders = [*WEIGHT_LOADERS]
        args.engine_plugins.append(PLUGIN)


def check_plain_push(args: Namespace) -> Iterator[str]:
    """Yield a message for each setting that a plain push cannot do."""
    if args.weight_push != "plain":
        return
    if args.check_weight_update_equal:
        yield "--weight-push plain compares nothing; drop --check-weight-update-equal, or use --weight-push verified."
    if args.weight_push_failure == "drop":
        yield (
            "--weight-push plain leaves no engine out of a push, so --weight-push-failure drop has no effect; use "
            "refill or stop, or --weight-push verified."
        )


GROUP = FlagGroup(add_fast_push_arguments, derive=(derive_fast_push,), check=(check_plain_push,))
