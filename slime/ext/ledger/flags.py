"""Flags of the write-ahead log of prompt groups."""

from __future__ import annotations

import argparse
from pathlib import Path

from slime.flags.group import FlagGroup
from slime.flags.kinds import file_path, wait_s

FOLDER = "ledger"


def ledger_folder(given: str | None, save: str) -> Path:
    """Return the folder of a run's ledger: that of ``--rollout-ledger-dir``, or one in ``--save``."""
    return Path(given or Path(save) / FOLDER)


def add_ledger_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the ledger group to ``parser``."""
    group = parser.add_argument_group("ledger", "The write-ahead log of every prompt group; written with --save.")
    group.add_argument(
        "--no-rollout-ledger",
        action="store_true",
        help="Write no ledger: after a crash, everything since the last checkpoint is generated again.",
    )
    group.add_argument(
        "--rollout-ledger-dir",
        type=file_path,
        metavar="DIR",
        help="Folder of the ledger. Default: the folder ledger in --save.",
    )
    group.add_argument(
        "--rollout-ledger-flush-s",
        type=wait_s,
        default=0.02,
        help="Maximum seconds that a response stays in memory before the ledger writes it.",
    )
    group.add_argument(
        "--rollout-ledger-timeout-s",
        type=wait_s,
        default=60.0,
        help="Seconds that writes of the ledger may keep failing (a full disk) before the job ends.",
    )


GROUP = FlagGroup(add_ledger_arguments)
