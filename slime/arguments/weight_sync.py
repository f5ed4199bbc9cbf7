"""Flags of the push of weights from the trainer to the engines."""

from __future__ import annotations

import argparse

from slime.arguments.kinds import positive_int


def add_weight_sync_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the weight update group to ``parser``."""
    group = parser.add_argument_group("weight update", "How new weights reach the engines.")
    group.add_argument(
        "--update-weight-mode", choices=["full", "delta"], default="full", help="All weights, or changed bytes only."
    )
    group.add_argument(
        "--update-weight-transport", choices=["nccl", "disk"], default="nccl", help="What carries them."
    )
    group.add_argument(
        "--update-weight-buffer-size", type=positive_int, default=512 * 1024**2, help="Bytes sent in one bucket."
    )
    group.add_argument(
        "--update-weights-interval", type=positive_int, default=1, help="Rollouts between two pushes (train_async.py)."
    )
    group.add_argument(
        "--release-train", action="store_true", help="End the trainer's processes while the engines generate."
    )
    group.add_argument("--update-weight-disk-dir", default=None, metavar="DIR", help="Shared folder of versions.")
    group.add_argument(
        "--update-weight-disk-keep-files", action="store_true", help="Keep versions that every engine has loaded."
    )
    group.add_argument(
        "--update-weight-delta-encoding",
        choices=["xor", "overwrite"],
        default="xor",
        help="How changed bytes are written.",
    )
    group.add_argument(
        "--update-weight-delta-checksum",
        choices=["xxh3-128", "blake3", "adler32"],
        default="xxh3-128",
        help="What proves that a delta was applied right.",
    )
    group.add_argument(
        "--update-weight-local-checkpoint-dir",
        default=None,
        metavar="DIR",
        help="Folder on each engine's host that deltas are applied to.",
    )
    group.add_argument(
        "--weight-push-failure",
        choices=["refill", "drop", "stop"],
        default=None,
        help="What becomes of an engine that does not take a push: it is started again and filled, left out from then "
        "on, or ends the run. Default: refill with --use-fault-tolerance, otherwise stop.",
    )
    group.add_argument(
        "--check-weight-update-equal",
        action="store_true",
        help="After each push, compare the engines' weights with the trainer's; a difference ends the run.",
    )
