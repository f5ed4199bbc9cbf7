"""``metrics.jsonl``: every metric of a run, one JSON object a line; and the line that the driver prints for a step.

Several processes (driver, rollout manager, trainer) append to the one file; each record is a single locked write, so
lines never mix.  The file survives kills and resumes: a torn last line is closed before the next record, and readers
let the latest record of a step win.

    step 12/40 | reward 0.683 | loss 0.0012 | kl 0.0004 | grad 0.412 | gen 4.1k tok/s | train 7.9k tok/s | packed 97% |
    3.9 s = rollout 1.9 + train 1.6 + push 0.2
"""

from __future__ import annotations

import json
import math
import os
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.flags.observability import tracking_config
from slime.observability.alarms import WINDOW, Alarm, find_alarms
from slime.utils.atomic_file import lock_file

FILE_NAME = "metrics.jsonl"
ALARM_STEPS = 200
"""Steps that the driver looks back for alarms."""
LOCK_S = 30.0
"""For the write of another process to end."""
LOCK_POLL_S = 0.005
START_KEY = "run/start"
"""The record that each start of the job begins with, resumes included; its value is the run's id."""
_TIME_KEY = "time"


def run_folder(args: Namespace) -> Path | None:
    """Return the folder of this run: ``--save``, else ``runs/`` and the run's id; None while there is no id yet.

    A critic, whose checkpoints lie elsewhere, has the run's folder in ``args.run_folder``.
    """
    config = tracking_config(args)
    if folder := config.run_folder or config.save:
        return Path(folder).absolute()
    return Path("runs", config.wandb_run_id).absolute() if config.wandb_run_id else None


def metrics_path(args: Namespace) -> Path | None:
    """Return the path of this run's ``metrics.jsonl``; None when the run has no folder."""
    folder = run_folder(args)
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


class MetricsFile:
    """The tracker that appends to ``metrics.jsonl``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, metrics: Mapping[str, Any], step_key: str) -> None:
        """Append ``metrics`` (which hold ``step_key``) as one record."""
        append_record(self.path, metrics)

    def finish(self) -> None:
        """Do nothing: no file is held open between records."""


# label, metric names (the first that is there is shown), format
_FIELDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("rollout/raw_reward", "rollout/rewards"), "{:.3f}"),
    ("loss", ("train/loss",), "{:.4f}"),
    ("value loss", ("train/critic-value_loss",), "{:.4f}"),
    ("kl", ("train/kl_loss", "train/ppo_kl"), "{:.5f}"),
    ("entropy", ("train/entropy_loss",), "{:.3f}"),
    ("grad", ("train/grad_norm",), "{:.3f}"),
    ("lr", ("train/lr-pg_0",), "{:.2e}"),
    ("|dlogp|", ("train/train_rollout_logprob_abs_diff",), "{:.4f}"),
    ("len", ("rollout/response_len/mean",), "{:.1f}"),
)
_RATES = (("gen", "perf/rollout_tok_per_s"), ("train", "perf/train_tok_per_s"))
_PHASES = (
    ("rollout", ("perf/time_wait_for_rollout_s", "perf/time_rollout_s", "perf/rollout_time")),
    ("critic", ("perf/time_train_critic_s",)),
    ("train", ("perf/time_train_s", "perf/train_time", "perf/actor_train_time")),
    ("push", ("perf/time_push_s", "perf/weight_push_s", "perf/update_weights_time")),
    ("save", ("perf/time_save_s", "perf/save_model_time")),
    ("eval", ("perf/time_eval_s",)),
)
"""The waits of the driver, in its order; they add up to the step.  Finer spans are in ``metrics.jsonl``."""


def _first(metrics: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    for name in names:
        value = metrics.get(name)
        if isinstance(value, int | float):
            return float(value)
    return None


def _short(value: float) -> str:
    """Return 12.3k for 12345.0."""
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def evaluations(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return data set -> mean reward: the metrics ``eval/{name}`` that are neither an axis nor a detail."""
    found = {}
    for name, value in metrics.items():
        head, _, rest = name.partition("/")
        is_detail = "/" in rest or rest == "step" or rest.endswith("-truncated_ratio") or "-pass@" in rest
        if head == "eval" and not is_detail and isinstance(value, int | float):
            found[rest] = float(value)
    return found


def format_step(rollout_id: int, metrics: Mapping[str, Any], *, num_rollout: int | None = None) -> str:
    """Return the line of step ``rollout_id`` (shown from 1), without figures that were not measured."""
    parts = [f"step {rollout_id + 1}" + (f"/{num_rollout}" if num_rollout else "")]
    for label, names, shape in _FIELDS:
        value = _first(metrics, names)
        if value is not None:
            parts.append(f"{label} {shape.format(value)}")
    parts += [f"eval {name} {value:.3f}" for name, value in evaluations(metrics).items()]
    for label, name in _RATES:
        value = _first(metrics, (name,))
        if value is not None:
            parts.append(f"{label} {_short(value)} tok/s")
    packed = _first(metrics, ("perf/packing_efficiency",))
    if packed is not None:
        parts.append(f"packed {packed:.0%}")
    phases = [(label, value) for label, names in _PHASES if (value := _first(metrics, names)) is not None]
    total = _first(metrics, ("perf/time_step_s", "perf/step_time"))
    if phases:
        spans = " + ".join(f"{label} {value:.1f}" for label, value in phases)
        parts.append(f"{total:.1f} s = {spans}" if total is not None else f"seconds: {spans}")
    return " | ".join(parts)


class StepLine:
    """A reader of ``metrics.jsonl``: each ``line`` shows the metrics logged since the one before.

    Records of a later rollout (generated ahead of time) are kept for the line of their own step.
    """

    def __init__(self, path: Path | None, *, num_rollout: int | None = None) -> None:
        self._new = NewRecords(path)
        self._num_rollout = num_rollout
        self._early: list[dict[str, Any]] = []
        self._seen: dict[int, dict[str, Any]] = {}
        self._known: set[str] = set()
        self.new_alarms: list[Alarm] = []
        """Those that the last line told of first."""

    @classmethod
    def follow(cls, args: Namespace) -> StepLine:
        """Return the reader of the run that ``args`` describe; it skips the records that its file already has."""
        return cls(metrics_path(args), num_rollout=tracking_config(args).num_rollout)

    def gather(self, step: int) -> dict[str, Any]:
        """Return the metrics logged since the last call, up to the rollout at ``step`` of the axis."""
        records = self._early + self._new.read()
        merged: dict[str, Any] = {}
        self._early = []
        for record in records:
            if record.get("rollout/step", step) > step:
                self._early.append(record)
            else:
                merged.update(record)
        return merged

    def line(self, rollout_id: int, step: int | None = None) -> str:
        """Return the line of ``rollout_id``, with the alarms that begin there.

        ``step`` is its place on the axis (``compute_rollout_step``); its own number when None.
        """
        metrics = self.gather(rollout_id if step is None else step)
        self._seen[rollout_id] = metrics
        if len(self._seen) > WINDOW + ALARM_STEPS:
            del self._seen[sorted(self._seen)[WINDOW]]  # the first ones are what later ones are compared with
        self.new_alarms = [alarm for alarm in find_alarms(self._seen) if alarm.name not in self._known]
        self._known |= {alarm.name for alarm in self.new_alarms}
        told = "".join(f" | ALARM {alarm.text}" for alarm in self.new_alarms)
        return format_step(rollout_id, metrics, num_rollout=self._num_rollout) + told
