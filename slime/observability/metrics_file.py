"""``metrics.jsonl``: every metric of a run, one JSON object a line.

Several processes (driver, rollout manager, trainer) append to the one file; each record is a single locked write, so
lines never mix.  The file survives kills and resumes: a torn last line is closed before the next record, and readers
let the latest record of a step win.
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
"""For the write of another process to end."""
LOCK_POLL_S = 0.005
START_KEY = "run/start"
"""The record that each start of the job begins with, resumes included; its value is the run's id."""
_TIME_KEY = "time"


def run_folder(config: TrackingConfig) -> Path | None:
    """Return the folder of this run: ``--save``, else ``runs/`` and the run's id; None while there is no id yet."""
    if folder := config.run_folder or config.save:
        return Path(folder).absolute()
    return Path("runs", config.wandb_run_id).absolute() if config.wandb_run_id else None


def metrics_path(config: TrackingConfig) -> Path | None:
    """Return the path of this run's ``metrics.jsonl``; None when the run has no folder."""
    folder = run_folder(config)
    return folder / FILE_NAME if folder else None


def plain(value: Any) -> Any:
    """Return ``value`` for JSON: tensors and numpy scalars become numbers, NaN and infinities become text."""
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
    """Append one record; whole, or (when the process dies in the middle) as a torn line that readers skip.

    Raises:
        OSError: there is no room for it.
    """
    record = {_TIME_KEY: round(time.time(), 3), **{key: plain(value) for key, value in metrics.items()}}
    append_line(path, json.dumps(record, ensure_ascii=True) + "\n")


def append_line(path: Path, text: str) -> None:
    """Append whole lines in one locked write, after the end of a line that a killed writer left torn.

    Raises:
        OSError: there is no room for them, or another writer keeps the file locked.
    """
    line = text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        lock_file(descriptor, path, timeout_s=LOCK_S, poll_s=LOCK_POLL_S)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line  # a writer was killed in the middle of its line
        while line:  # a disk that is nearly full takes the first bytes without an error
            line = line[os.write(descriptor, line) :]
    finally:
        os.close(descriptor)


def parse_record(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object that a text is; None where it is something else, or torn."""
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of the file in the order of writing; torn lines are skipped."""
    with open(path, "rb") as file:
        for line in file:
            record = parse_record(line)
            if record is not None:
                yield record


class NewRecords:
    """The records that are appended to a file from now on; none without a file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._offset = path.stat().st_size if path is not None and path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        """Return those of the whole lines since the last call."""
        if self._path is None or not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [record for line in complete.splitlines() if (record := parse_record(line)) is not None]


def merge_by_step(records: Iterable[dict[str, Any]], step_key: str) -> dict[int, dict[str, Any]]:
    """Return step -> metrics, for the records that carry ``step_key``; in each step the latest value of a metric wins.

    So a step that was trained again after a resume shows what the surviving lineage holds.
    """
    steps: dict[int, dict[str, Any]] = {}
    for record in records:
        if step_key in record:
            steps.setdefault(int(record[step_key]), {}).update(record)
    return dict(sorted(steps.items()))


def evaluations(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return data set -> mean reward: the metrics ``eval/{name}`` that are neither an axis nor a detail."""
    found = {}
    for name, value in metrics.items():
        head, _, rest = name.partition("/")
        is_detail = "/" in rest or rest == "step" or rest.endswith("-truncated_ratio") or "-pass@" in rest
        if head == "eval" and not is_detail and isinstance(value, int | float):
            found[rest] = float(value)
    return found
