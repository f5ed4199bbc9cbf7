"""Writes the part of a run's record that one process has: ``events.jsonl``, ``spans.json``, ``samples/``.

Spans and samples are written by a thread, which leaves out what it cannot keep up with, and warns: a record never
delays a step.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime.observability.metrics_file import append_line, append_record, plain
from slime.observability.telemetry import FLUSH_TIMEOUT_S
from slime.utils.redaction import redacted

logger = logging.getLogger(__name__)

EVENTS_FILE, SPANS_FILE, SAMPLES_FOLDER = "events.jsonl", "spans.json", "samples"
FLUSH_S = 2.0
QUEUE_LENGTH = 64
"""Rollouts whose samples wait to be written; further ones are left out."""


class RecordWriter:
    """The thread of a process that writes its spans and samples."""

    def __init__(self, folder: Path, process: str) -> None:
        self.folder, self.process = folder, process
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUE_LENGTH)
        self._spans: list[dict[str, Any]] = []
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="run-record", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Path], None]) -> None:
        """Have the thread call ``work`` with the run's folder; it is left out while too much waits."""
        try:
            self._queue.put_nowait(lambda: work(self.folder))
        except queue.Full:
            logger.warning("The record of %s leaves out data: its disk is too slow.", self.process)

    def event(self, name: str, facts: Mapping[str, Any]) -> None:
        """Write an event, now: of texts the first line, since the others are often the end of a log."""
        lines = {key: one.strip().partition("\n")[0] if isinstance(one, str) else one for key, one in facts.items()}
        record = {"event": name, "process": self.process, **redacted(plain(lines))}
        try:
            append_record(self.folder / EVENTS_FILE, record)
        except OSError as error:
            logger.debug("the event %s is lost: %s", name, error)

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
