"""The record of a run in its folder (``docs/record.md``), unless ``--no-record`` is given.

    config.json      the last start: command, every resolved value and its origin, versions, commit, hardware
    events.jsonl     starts, ends, deaths, pushes, saves, warnings, alarms: {"time", "event", "process", ...}
    spans.json       phases of every process, in Perfetto's trace format: an array, one span a line, never closed
    samples/         the samples of each rollout and evaluation (``sample_record``)

The driver begins the record; a process joins it when ``config.json`` is there.  Spans and samples are written by one
thread of each process, which leaves out what it cannot keep up with, and warns: a record never delays a step.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import platform
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from slime.flags.observability import record_config
from slime.observability.metrics_file import append_line, append_record, plain, run_folder
from slime.observability.timer import Timer
from slime.utils import env
from slime.utils.atomic_file import replace_file
from slime.utils.redaction import hide_values, redacted, redacted_words

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
CONFIG_FILE, EVENTS_FILE, SPANS_FILE, SAMPLES_FOLDER = "config.json", "events.jsonl", "spans.json", "samples"
PACKAGES = ("torch", "megatron-core", "sglang", "ray", "transformers", "numpy", "pyarrow", "slime-posttrain")
ENVIRONMENT = re.compile(r"(SLIME|NCCL|CUDA|SGLANG|OMP|TORCH|PYTORCH|NVTE|HF_HUB)_")
FLUSH_S = 2.0
QUEUE_LENGTH = 64
"""Rollouts whose samples wait to be written; further ones are left out."""
SAME_WARNINGS = 5
"""Times that one warning is recorded in a process."""
FLUSH_TIMEOUT_S = 30.0


class _RecordWriter:
    """The thread of a process that writes its spans and samples."""

    def __init__(self, folder: Path, process: str) -> None:
        self.folder, self.process = folder, process
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUE_LENGTH)
        self._spans: list[dict[str, Any]] = []
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="run-record", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Have the thread do ``work``; it is left out while too much waits."""
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            logger.warning("The record of %s leaves out data: its disk is too slow.", self.process)

    def add_span(self, name: str, start: float, end: float, attrs: Mapping[str, Any]) -> None:
        """Keep a span for the next write."""
        identity = {"name": name, "ph": "X", "pid": self.process, "tid": threading.current_thread().name}
        times = {"ts": round(start * 1e6), "dur": round((end - start) * 1e6)}
        with self._guard:
            self._spans.append(identity | times | {"args": redacted(plain(dict(attrs)))})

    def flush(self) -> None:
        """Wait until what was submitted is written, twice ``FLUSH_TIMEOUT_S`` at most."""
        done = threading.Event()

        def write() -> None:
            self._write_spans()
            done.set()

        try:
            self._queue.put(write, timeout=FLUSH_TIMEOUT_S)
        except queue.Full:
            return
        done.wait(FLUSH_TIMEOUT_S)

    def close(self) -> None:
        """Write what waits and end the thread; what takes longer than ``FLUSH_TIMEOUT_S`` is lost."""
        try:
            self._queue.put(None, timeout=FLUSH_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(FLUSH_TIMEOUT_S)

    def _loop(self) -> None:
        is_open = True
        while is_open:
            try:
                work = self._queue.get(timeout=FLUSH_S)
                is_open = work is not None
                if work is not None:
                    work()
            except queue.Empty:
                logger.debug("nothing to record")
            except Exception:  # the edge of the thread: a record never ends a run
                logger.exception("A part of the record of %s is lost.", self.process)
            self._write_spans()

    def _write_spans(self) -> None:
        with self._guard:
            spans, self._spans = self._spans, []
        if not spans:
            return
        path = self.folder / SPANS_FILE
        lines = "".join(json.dumps(span) + ",\n" for span in spans)
        try:
            append_line(path, lines if path.exists() else "[\n" + lines)
        except OSError as error:
            logger.error("%d spans are lost, %s cannot be written: %s", len(spans), path, error)


class _Recorder:
    """The record of this process."""

    writer: _RecordWriter | None = None
    handler: logging.Handler | None = None


class _Warnings(logging.Handler):
    """Makes events of warnings and errors, a few of each kind."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Record one line of the log."""
        self._counts[str(record.msg)] += 1
        if self._counts[str(record.msg)] <= SAME_WARNINGS and record.name != __name__:
            event("warning", level=record.levelname.lower(), where=record.name, text=record.getMessage()[:2000])


def start_recording(args: Namespace, process: str, *, primary: bool = False) -> bool:
    """Record what this process does from here on; return whether the run is recorded.

    Args:
        args: the run's arguments, complete or not.
        process: its name, such as ``actor 0``.
        primary: the driver, which begins the record and describes the run.
    """
    stop_recording()
    hide_values(args)
    folder = run_folder(args)
    if folder is None or not record_config(args).record or not (primary or (folder / CONFIG_FILE).exists()):
        return False
    try:
        if primary:
            folder.mkdir(parents=True, exist_ok=True)
            _write_config(args, folder)
    except OSError as error:
        logger.error("This run is not recorded: %s", error)
        return False
    _Recorder.writer = _RecordWriter(folder, process)
    _Recorder.handler = _Warnings()
    logging.getLogger("slime").addHandler(_Recorder.handler)
    Timer().on_end = span
    return True


def stop_recording() -> None:
    """Write what waits and close the record of this process; safe to call twice."""
    if _Recorder.handler is not None:
        logging.getLogger("slime").removeHandler(_Recorder.handler)
        _Recorder.handler = None
    Timer().on_end = None
    hide_values(Namespace())
    if _Recorder.writer is not None:
        _Recorder.writer.close()  # its thread still records what its files cost
        _Recorder.writer = None


def flush_recording() -> None:
    """Write what waits: this process may be killed from here on."""
    if _Recorder.writer is not None:
        _Recorder.writer.flush()


def is_recording() -> bool:
    """Return whether this process takes part in a record."""
    return _Recorder.writer is not None


def event(kind: str, **facts: Any) -> None:
    """Record that something happened, now: of texts the first line, since the others are often the end of a log."""
    if (writer := _Recorder.writer) is None:
        return
    lines = {name: fact.strip().partition("\n")[0] if isinstance(fact, str) else fact for name, fact in facts.items()}
    record = {"event": kind, "process": writer.process, **redacted(plain(lines))}
    try:
        append_record(writer.folder / EVENTS_FILE, record)
    except OSError as error:
        logger.debug("the event %s is lost: %s", kind, error)


def span(name: str, start: float, end: float, **attrs: Any) -> None:
    """Record work that took from ``start`` to ``end``, in seconds since the epoch."""
    if (writer := _Recorder.writer) is not None:
        writer.add_span(name, start, end, attrs)


@contextmanager
def recorded_span(name: str, **attrs: Any) -> Iterator[None]:
    """Record the body of a ``with`` as a span; one that fails too."""
    start = time.time()
    try:
        yield
    finally:
        span(name, start, time.time(), **attrs)


def submit(work: Callable[[Path], None]) -> None:
    """Have the thread of the record call ``work`` with the run's folder."""
    if (writer := _Recorder.writer) is not None:
        writer.submit(lambda: work(writer.folder))


# The description of the run


def _write_config(args: Namespace, folder: Path) -> None:
    shown = vars(redacted(args))
    shown.pop("value_origins", None)
    origins = vars(args).get("value_origins", {})  # the names of settings, those of secrets too
    values = {
        name: {"value": _shown(value), "origin": origins.get(name, "default")} for name, value in sorted(shown.items())
    }
    variables = {name: value for name, value in env.copy().items() if ENVIRONMENT.match(name)}
    content = {
        "format_version": FORMAT_VERSION,
        "run_id": shown.get("wandb_run_id"),
        "time": round(time.time(), 3),
        "command": redacted_words(sys.argv),
        "folder": str(Path.cwd()),
        "values": values,
        "environment": redacted(variables),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "git": _git(),
        "hardware": _hardware(),
    }
    # A path that is no UTF-8 has half surrogate pairs, of which this makes JSON's own escapes.
    text = json.dumps(content, indent=1, ensure_ascii=False).encode("utf-8", "backslashreplace")
    replace_file(folder / CONFIG_FILE, lambda file: file.write(text), to_disk=False)


def _shown(value: Any) -> Any:
    """Return ``value`` as JSON has it; what is no plain value becomes text."""
    if isinstance(value, Namespace):
        return {name: _shown(one) for name, one in vars(value).items()}
    return plain(value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any]:
    """Return commit and changed files of the checkout that slime runs from; empty outside of one."""
    git, root = shutil.which("git"), Path(__file__).resolve().parents[2]
    if git is None or not (root / ".git").exists():
        return {}

    def ask(*words: str) -> str:
        return subprocess.run(
            [git, "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "changed": ask("status", "--porcelain", "-uno").splitlines()[:100]}
    except (OSError, subprocess.SubprocessError):
        return {}


def _hardware() -> dict[str, Any]:
    """Return what the driver's machine is."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpus": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
        "cuda": torch.version.cuda,
    }
