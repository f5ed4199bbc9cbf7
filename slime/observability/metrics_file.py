"""``metrics.jsonl``: every metric of a run, one JSON object a line, in the run's folder.

Several processes (driver, rollout manager, trainer) append to the one file; each record is a single locked write, so
lines never mix.  The file survives kills and resumes: a torn last line is closed before the next record, and readers
let the latest record of a step win.  What is drawn from the file is in ``examples`` and ``step_line``.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.flags.observability import tracking_config

logger = logging.getLogger(__name__)

FILE_NAME = "metrics.jsonl"
START_KEY = "run/start"
"""The record that each start of the job begins with, resumes included; its value is the run's id."""
_TIME_KEY = "time"


def run_folder(args: Namespace) -> Path | None:
    """The folder of this run: ``--save``, else ``runs/`` and the run's id; None while there is no id yet.

    A critic, whose checkpoints lie elsewhere, has the run's folder in ``args.run_folder``.
    """
    config = tracking_config(args)
    if folder := config.run_folder or config.save:
        return Path(folder).absolute()
    return Path("runs", config.wandb_run_id).absolute() if config.wandb_run_id else None


def metrics_path(args: Namespace) -> Path | None:
    """Where this run's ``metrics.jsonl`` lies; None when the run has no folder."""
    folder = run_folder(args)
    return folder / FILE_NAME if folder else None


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it: tensors and numpy scalars become numbers, NaN and infinities become text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def append_record(path: Path, metrics: Mapping[str, Any]) -> None:
    """Append one record; whole, or (when the process dies in the middle) as a torn line that readers skip.

    Raises:
        OSError: there is no room for it.
    """
    record = {_TIME_KEY: round(time.time(), 3), **{key: _plain(value) for key, value in metrics.items()}}
    line = (json.dumps(record, ensure_ascii=True) + "\n").encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line  # a writer was killed in the middle of its line
        while line:  # a disk that is nearly full takes the first bytes without an error
            line = line[os.write(descriptor, line) :]
    finally:
        os.close(descriptor)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of the file in the order of writing; torn lines are skipped."""
    with open(path, "rb") as file:
        for line in file:
            record = _record(line)
            if record is not None:
                yield record


def read_new_records(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The whole lines behind byte ``offset``, and the offset to go on from.  A file that is not there yet is empty."""
    if not path.exists():
        return [], offset
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read()
    complete = data[: data.rfind(b"\n") + 1]
    records = [record for line in complete.splitlines() if (record := _record(line)) is not None]
    return records, offset + len(complete)


def merge_by_step(records: Iterable[dict[str, Any]], step_key: str) -> dict[int, dict[str, Any]]:
    """step -> metrics, for the records that carry ``step_key``; in each step the latest value of a metric wins.

    So a step that was trained again after a resume shows what the surviving lineage holds.
    """
    steps: dict[int, dict[str, Any]] = {}
    for record in records:
        if step_key in record:
            steps.setdefault(int(record[step_key]), {}).update(record)
    return dict(sorted(steps.items()))


class MetricsFile:
    """The tracker that appends to ``metrics.jsonl``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, metrics: Mapping[str, Any], step_key: str) -> None:
        """Append ``metrics`` (which hold ``step_key``) as one record."""
        append_record(self.path, metrics)

    def finish(self) -> None:
        """Nothing is held open between records."""
