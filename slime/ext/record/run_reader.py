"""Reads the record of a run (``docs/record.md``), of a running or broken one too: what is not there is empty."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from slime.ext.record.accounting import GpuClass, Span, gpu_classes
from slime.ext.record.run_record import CONFIG_FILE, is_alive
from slime.ext.record.sample_record import BEFORE_ALL, rollout_of, samples_path
from slime.ext.record.writer import EVENTS_FILE, SAMPLES_FOLDER, SPANS_FILE
from slime.observability.metrics_file import FILE_NAME, START_KEY, merge_by_step, parse_record, read_records
from slime.utils.errors import DataError

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """The files of a run, read as far as they are written."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    rollouts: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rollout -> metrics."""
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Optimizer step -> metrics."""
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The rollout before it, ``BEFORE_ALL`` before the first one -> metrics."""

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps on one rollout, at least 1."""
        return max(1, round(len(self.steps) / max(1, len(self.rollouts))))

    def value(self, name: str, default: Any = None) -> Any:
        """Return the resolved value of a flag."""
        entry = self.config.get("values", {}).get(name)
        return default if entry is None or entry["value"] is None else entry["value"]

    @property
    def num_rollout(self) -> int | None:
        """Rollouts of the whole run, as the last start that trains said: with ``--num-epoch`` no flag does."""
        starts = [one for one in self.events if one["event"] == "start" and one.get("num_rollout")]
        length: int | None = starts[-1]["num_rollout"] if starts else self.value("num_rollout")
        return length

    @property
    def has_gpus(self) -> bool:
        """Whether the run has real GPUs: its cluster by the last start, else the driver's machine."""
        said = [one["has_gpus"] for one in self.events if "has_gpus" in one]
        return bool(said[-1] if said else self.config.get("hardware", {}).get("gpus"))

    @property
    def gpu_classes(self) -> list[GpuClass]:
        """The classes of GPUs of the run."""
        has_trainer = not self.value("debug_rollout_only", False)
        trainers = has_trainer * self.value("actor_num_nodes", 1) * self.value("actor_num_gpus_per_node", 1)
        engines = 0 if self.value("debug_train_only", False) else self.value("rollout_num_gpus", 0)
        return gpu_classes(trainers, engines, is_shared=bool(self.value("colocate", False)))

    @property
    def state(self) -> str:
        """How the last start ended: ``finished``, ``stopped`` (Ctrl-C), ``failed`` or ``cut off`` (killed); else
        ``running``.  A start on another machine that has not ended is ``running or cut off``.
        """
        alive = is_alive(self.config.get("process", {}))
        ends = [one for one in self.events if one["event"] in ("start", "finish", "failed")][-1:]
        has_begun_since = alive and self.config["time"] > max((one.get("time", 0) for one in ends), default=0)
        last = "start" if has_begun_since or not ends else ends[0]["event"]
        if last == "failed":
            return "stopped" if ends[0].get("code", 0) > 128 else "failed"
        if last == "finish":
            return "finished"
        return {True: "running", False: "cut off", None: "running or cut off"}[alive]

    @property
    def digests(self) -> dict[int, str]:
        """Rollout -> digest of the trained weights of all ranks after it."""
        return self._digests("actor")

    @property
    def critic_digests(self) -> dict[int, str]:
        """The same of a critic's weights."""
        return self._digests("critic")

    def _digests(self, role: str) -> dict[int, str]:
        weights = [one for one in self.events if one["event"] == "weights" and one.get("role", "actor") == role]
        return {one["rollout"]: one["digest"] for one in weights}

    def sample_files(self, kind: str = "rollout") -> list[Path]:
        """Return the files of samples, by rollout."""
        folder = self.folder / SAMPLES_FOLDER
        return sorted(folder.glob(f"{kind}_*.parquet"), key=lambda path: (rollout_of(path), path.name))

    def sample_file(self, rollout_id: int) -> Path:
        """Return the path of a rollout's samples."""
        return samples_path(self.folder / SAMPLES_FOLDER, rollout_id)

    def samples(self, rollout_id: int) -> Iterator[dict[str, Any]]:
        """Yield the samples of a rollout, with what the trainer added; a file that is being written is skipped."""
        table = read_samples(self.sample_file(rollout_id))
        yield from table.to_pylist() if table is not None else []


def trained_files(path: Path) -> list[Path]:
    """Return the files in which the trainer's ranks added to the samples of ``path``."""
    return sorted(path.parent.glob(samples_path(path.parent, rollout_of(path), "*").name))


def read_samples(
    path: Path, columns: Sequence[str] | None = None, trained: Sequence[Path] | None = None
) -> pa.Table | None:
    """Return the samples of a file ``rollout_N.parquet`` with what the trainer added; None where it cannot be read.

    Args:
        path: of the file.
        columns: names beside ``position``; all when None, and those that the files do not have are left out.
        trained: the files of the trainer's ranks; those that lie beside it when None.
    """
    wanted = None if columns is None else ["position", *columns]
    if (table := _table(path, wanted)) is None:
        return None
    added = [
        one
        for one in (_table(name, wanted) for name in (trained_files(path) if trained is None else trained))
        if one is not None
    ]
    if added:
        both = pa.concat_tables(added)
        # A join of Arrow takes no lists.
        rows = pc.index_in(table["position"], value_set=both["position"].combine_chunks())
        for name in both.column_names:
            if name != "position":
                table = table.append_column(name, both[name].take(rows))
    return table


def _table(path: Path, columns: Sequence[str] | None) -> pa.Table | None:
    try:
        with path.open("rb") as data:  # Arrow itself opens no file whose name is not UTF-8
            file = pq.ParquetFile(data, page_checksum_verification=True)
            wanted = None if columns is None else [name for name in file.schema_arrow.names if name in columns]
            table = file.read(wanted, use_threads=False)
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowException) as error:
        logger.warning("%s is left out, because it cannot be read: %s", path, str(error).partition("\n")[0])
        return None
    for place, column in enumerate(table.schema):
        if column.type == pa.string():
            table = table.set_column(place, column.name, _as_utf8(table[column.name]))
    return table


def _as_utf8(texts: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
    """Return texts of which every byte that is no UTF-8 became a mark."""
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        raw = texts.cast(pa.binary()).to_pylist()
        return pa.array([None if one is None else one.decode("utf-8", "replace") for one in raw], pa.string())
    return texts


def read_run(folder: Path, *, with_spans: bool = True) -> Run:
    """Return the run in ``folder``; the spans are most of its bytes.

    Raises:
        DataError: there is none.
    """
    metrics = folder / FILE_NAME
    if not metrics.is_file():
        raise DataError(f"{folder} has no {FILE_NAME}; give the folder of a run: its --save, else runs/ and its id.")
    records = list(read_records(metrics))
    run = Run(folder)
    config, events, spans = (folder / name for name in (CONFIG_FILE, EVENTS_FILE, SPANS_FILE))
    run.config = parse_record(config.read_bytes()) or {} if config.is_file() else {}
    run.events = [one for one in read_records(events) if "event" in one] if events.is_file() else []
    if with_spans and spans.is_file():
        run.spans = list(_read_spans(spans))
    run.rollouts = _by_rollout(run, merge_by_step(records, "rollout/step"))
    run.steps = merge_by_step(records, "train/step")
    run.evaluations = _evaluations_of(run, records)
    run.config.setdefault("run_id", next((one[START_KEY] for one in records if START_KEY in one), None))
    return run


def _evaluations_of(run: Run, records: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the evaluations by rollout.  The first rollout and the evaluation before it are both step 0.

    Any step that was logged shows that the run has begun: with ``--custom-rollout-log-function-path`` the metrics of
    rollouts may be missing, and those of training are there.
    """
    first: dict[str, Any] = {}
    others: list[dict[str, Any]] = []
    begins, has_begun = {"rollout/step", "train/step"}, False
    for record in records:
        has_begun = START_KEY not in record and (has_begun or not begins.isdisjoint(record))
        if record.get("eval/step") == 0 and not has_begun:
            first.update(record)
        else:
            others.append(record)
    found = _by_rollout(run, merge_by_step(others, "eval/step"))
    return {BEFORE_ALL: first} | found if first else found


def _by_rollout(run: Run, metrics: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Undo ``compute_rollout_step``, which counts optimizer steps with ``--wandb-always-use-train-step``."""
    if not run.value("wandb_always_use_train_step", False):
        return metrics
    samples = run.value("rollout_batch_size") * run.value("n_samples_per_prompt")
    return {-(-step * run.value("global_batch_size") // samples): values for step, values in metrics.items()}


def _read_spans(path: Path) -> Iterator[Span]:
    """Yield the spans of a trace; torn lines are skipped."""
    with open(path, "rb") as file:
        for line in file:
            one = parse_record(line.strip().rstrip(b","))
            if one is not None and {"name", "pid", "ts", "dur"} <= one.keys():
                start = one["ts"] / 1e6
                yield Span(
                    one["name"], one["pid"], start, start + one["dur"] / 1e6, one.get("args", {}).get("rollout")
                )
