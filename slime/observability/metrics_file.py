"""``metrics.jsonl``: every metric of a run, one JSON object per line.

Several processes (driver, rollout manager, trainer) append to the file; each record is a single locked write, so lines
never interleave.  The file survives kills and resumes: a torn last line is terminated before the next record, and in
readers the latest record of a step wins.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.flags.observability import TrackingConfig
from slime.utils.files import lock_file

FILE_NAME = "metrics.jsonl"
LOCK_S = 30.0
"""Seconds to wait for another process's write."""
LOCK_POLL_S = 0.005
START_KEY = "run/start"
"""Key of the record written at each start of the job, including resumes; its value is the run's id."""
_TIME_KEY = "time"


def run_folder(config: TrackingConfig) -> Path | None:
    """Return this run's folder: ``config.run_folder``, else ``--save``, else ``runs/ID``; None without an id."""
    if folder := config.run_folder or config.save:
        return Path(folder).absolute()
    return Path("runs", config.wandb_run_id).absolute() if config.wandb_run_id else None


def metrics_path(config: TrackingConfig) -> Path | None:
    """Return the path of this run's ``metrics.jsonl``; None if the run has no folder."""
    folder = run_folder(config)
    return folder / FILE_NAME if folder else None


def plain(value: Any) -> Any:
    """Convert ``value`` for JSON: tensors and numpy scalars become numbers, NaN and infinities become strings."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def append_record(path: Path, metrics: Mapping[str, Any]) -> None:
    """Append one record; if the process dies during the write, readers skip the torn line.

    Raises:
        OSError: see :func:`append_line`.
    """
    record = {_TIME_KEY: round(time.time(), 3), **{key: plain(value) for key, value in metrics.items()}}
    append_line(path, json.dumps(record, ensure_ascii=True) + "\n")


def append_line(path: Path, text: str) -> None:
    """Append whole lines in one locked write, first terminating a torn line of a killed writer.

    Raises:
        OSError: the disk is full, or another writer keeps the file locked.
    """
    line = text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        lock_file(descriptor, path, timeout_s=LOCK_S, poll_s=LOCK_POLL_S)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line  # a writer was killed in the middle of its line
        while line:  # a nearly full disk accepts part of a write without an error
            line = line[os.write(descriptor, line) :]
    finally:
        os.close(descriptor)


def parse_record(text: bytes) -> dict[str, Any] | None:
    """Parse a JSON object; None if the text is something else or torn."""
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the file's records in the order written; torn lines are skipped."""
    with open(path, "rb") as file:
        for line in file:
            record = parse_record(line)
            if record is not None:
                yield record


class NewRecords:
    """Reads the records appended to a file after this object's creation; without a file there are none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._offset = path.stat().st_size if path is not None and path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        """Return the records of complete lines since the last call."""
        if self._path is None or not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [record for line in complete.splitlines() if (record := parse_record(line)) is not None]


def merge_by_step(records: Iterable[dict[str, Any]], step_key: str) -> dict[int, dict[str, Any]]:
    """Return step -> metrics for the records with ``step_key``; the latest value of a metric wins.

    So a step that was repeated after a resume shows the values of the repetition.
    """
    steps: dict[int, dict[str, Any]] = {}
    for record in records:
        if step_key in record:
            steps.setdefault(int(record[step_key]), {}).update(record)
    return dict(sorted(steps.items()))


def evaluations(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return data set -> mean reward: the metrics ``eval/{name}`` that are neither an x axis nor a detail."""
    found = {}
    for name, value in metrics.items():
        head, _, rest = name.partition("/")
        is_detail = "/" in rest or rest == "step" or rest.endswith("-truncated_ratio") or "-pass@" in rest
        if head == "eval" and not is_detail and isinstance(value, int | float):
            found[rest] = float(value)
    return found
