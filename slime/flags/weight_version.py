"""The last weight version of a run, in a file of ``--save``: the same command counts on from it.

Counted from the rollout alone, a push that was repeated would leave samples in the ledger whose version comes again
for other weights, and which look younger than they are (``--max-staleness``).
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from slime.utils.atomic_file import write_atomically
from slime.utils.errors import DataError
from slime.utils.json_file import read_object

REMEDY = "Remove it to count versions from the rollout."


def _path(folder: str) -> Path:
    return Path(folder) / "rollout" / "weight_version.json"


def version_before(args: Namespace, start_rollout_id: int) -> int:
    """Return the version from which a trainer that goes on with ``start_rollout_id`` counts its pushes.

    Raises:
        DataError: the file of ``--load`` or ``--save`` is damaged.
    """
    version = max(start_rollout_id, args.update_weight_start_version)
    for path in {_path(folder) for folder in (args.load, args.save) if folder is not None}:
        if not path.is_file():
            continue
        told = read_object(path, remedy=REMEDY)
        last, rollout_id = told.get("version"), told.get("rollout")
        if not isinstance(last, int) or not isinstance(rollout_id, int):
            raise DataError(f"{path} says version {last!r} of rollout {rollout_id!r}; both must be numbers. {REMEDY}")
        # The weights after the same rollout are the same, and keep their version.
        version = max(version, last - (rollout_id == start_rollout_id - 1))
    return version


class VersionCount:
    """The versions of a run as its driver counts them: at least as high as its trainer's."""

    number = 0
    """Of the last push."""
    rollout_id = -1
    """The last rollout that the weights were trained on."""

    def start(self, args: Namespace, start_rollout_id: int) -> None:
        """Count on as a trainer that goes on with ``start_rollout_id``."""
        self.number, self.rollout_id = version_before(args, start_rollout_id), start_rollout_id - 1

    def count(self, folder: str | None) -> None:
        """Count a push, before any engine gets its version; ``folder``: of ``--save``."""
        self.number += 1
        if folder is not None:
            content = json.dumps({"version": self.number, "rollout": self.rollout_id}).encode()
            write_atomically(_path(folder), lambda file: file.write(content), what="The weight version")
