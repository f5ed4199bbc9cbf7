"""A process's telemetry stream: spans, events and metrics, sent to its sinks.

    with span("push"): ...                     a span; its seconds are summed by name for the metrics of the step
    span("step", began, ended, rollout=3)      a finished span, in seconds since the epoch; not summed
    event("save", rollout=3)                   something happened now
    log(metrics, step_key="train/step")        a record of metrics

``start`` opens the sinks: ``metrics.jsonl``, and those that the composition root chooses
(``slime.ray.parts.Parts.sinks``).  A sink is a subclass of :class:`Sink`.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, overload

import torch

from slime.flags.observability import TrackingConfig
from slime.observability.metrics_file import START_KEY, append_record, metrics_path
from slime.utils.misc import SingletonMeta
from slime.utils.redaction import hide_values

logger = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 30.0
"""Seconds for a sink to flush."""


class Sink:
    """Receives one process's telemetry; subclasses override the methods they need, which do nothing here.

    Methods must not modify their arguments or delay a step, and may be called from any thread.
    """

    wants: ClassVar[tuple[str, ...]] = ()
    """Additional reports needed from the trainer: ``details``, the parts of a step, samples and weight digests;
    ``ranks``, metrics of every rank."""

    def log(self, metrics: Mapping[str, Any], step_key: str) -> None:
        """Receive a record of metrics; ``metrics[step_key]`` is its x-axis value."""

    def begin(self, name: str, fields: Mapping[str, Any]) -> None:
        """Receive the begin of a span; not called for spans reported after their end."""

    def span(self, name: str, began: float, ended: float, fields: Mapping[str, Any]) -> None:
        """Receive a finished span; times are in seconds since the epoch."""

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Receive an event."""

    def samples(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Receive samples of a kind listed in :func:`samples`."""

    def remarks(self, rollout_id: int, metrics: Mapping[str, Any]) -> Sequence[str]:
        """Return remarks on a rollout, given all its metrics; the driver prints them."""
        return ()

    def offer(self, ask: Callable[[Callable[..., Any]], Any]) -> None:
        """Receive ``ask``: at any time, ``ask(function)`` returns ``function(engines)`` for the job's engines."""

    def flush(self) -> None:
        """Write buffered data within ``FLUSH_TIMEOUT_S``."""

    def close(self) -> None:
        """Write buffered data and close; no further calls follow."""


class _Stream:
    args: Namespace | None = None
    sinks: tuple[Sink, ...] = ()
    wants: frozenset[str] = frozenset()
    values_of_the_run: dict[str, Any] = {}  # noqa: RUF012  one process, one run


def start(args: Namespace, process: str, sinks: Sequence[type[Sink]] = (), *, primary: bool = False) -> dict[str, Any]:
    """Open the sinks of this process.

    Args:
        args: the run's arguments; may be incomplete.
        process: this process's name.
        sinks: sinks in addition to ``metrics.jsonl``, each constructed with ``args``, ``process`` and ``primary``.  A
            run without a folder opens no sinks.
        primary: True in the driver.

    Returns:
        :func:`values_of_the_run`.

    Raises:
        Exception: raised by a sink that cannot open; the sinks opened before are closed.
    """
    stop()
    values: dict[str, Any] = {}
    if primary and TrackingConfig.of(args).wandb_run_id is None:
        # Shared with every process: a run without --save names its folder after this id.
        values["wandb_run_id"] = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    args = Namespace(**{**vars(args), **values})
    hide_values(args)
    _Stream.args, _Stream.values_of_the_run = args, values
    config = TrackingConfig.of(args)
    path = metrics_path(config)
    if path is not None:
        if primary:  # lets readers tell a resume from a first start
            append_record(path, {START_KEY: config.wandb_run_id})
        _Stream.wants = frozenset(what for sink in sinks for what in sink.wants)
        _Stream.sinks = (_MetricsFile(path),)
        try:
            for sink in sinks:
                _Stream.sinks = (*_Stream.sinks, sink(args, process, primary=primary))  # type: ignore[call-arg]
        except BaseException:
            _close_sinks()  # not stop(): the error's text must still be redacted with the run's secrets
            raise
    atexit.register(stop)
    return values


def is_open() -> bool:
    """Return whether this process called :func:`start` and has not called :func:`stop` since."""
    return _Stream.args is not None


def values_of_the_run() -> dict[str, Any]:
    """Return values that the driver generated for all processes (``wandb_run_id``); empty in other processes."""
    return _Stream.values_of_the_run


def stop() -> None:
    """Flush and close the sinks of this process; safe to call twice."""
    _close_sinks()
    _Stream.args, _Stream.wants = None, frozenset()
    hide_values(Namespace())


def _close_sinks() -> None:
    sinks, _Stream.sinks = _Stream.sinks, ()
    with ExitStack() as closing:  # closes all, even if one fails
        for sink in reversed(sinks):
            closing.callback(sink.close)


def flush() -> None:
    """Flush the sinks; this process may be killed afterwards."""
    for sink in _Stream.sinks:
        sink.flush()


def wants(what: str) -> bool:
    """Return whether a sink has ``what`` in its ``wants``; equal in all processes of a run."""
    return what in _Stream.wants


def log(metrics: Mapping[str, Any], step_key: str, args: Namespace | None = None) -> None:
    """Send one record to every sink.

    If a sink cannot write (a full disk), the record is lost there and an error is logged; training continues.

    Args:
        metrics: the record; must contain ``step_key``.
        step_key: name of the x axis.
        args: the run's arguments, for a process that may not have called :func:`start`.
    """
    if step_key not in metrics:
        raise KeyError(f"metrics lack {step_key!r}, the step that they belong to; they have {sorted(metrics)}")
    if not is_open() and args is not None:
        start(args, "")
    for sink in _Stream.sinks:
        try:
            sink.log(metrics, step_key)
        except OSError as error:
            logger.error(
                "Metrics of %s %s are lost, %s cannot write: %s",
                step_key,
                metrics[step_key],
                type(sink).__name__,
                error,
            )


def event(name: str, /, **fields: Any) -> None:
    """Report that something happened now."""
    for sink in _Stream.sinks:
        sink.event(name, fields)


def samples(kind: str, **facts: Any) -> None:
    """Send samples to the sinks.  Kinds and their facts:

    rollout      rollout_id, samples by position, rewards as the estimator takes them or None, is_loaded (the samples
                 come from a dump or from before a restart)
    dropped      samples, the filter's reason
    evaluation   rollout_id of the rollout before it (None before the first), data: data set -> its results
    trained      rollout_id, data-parallel rank, positions, columns: name -> host tensors, micro_batches
    """
    for sink in _Stream.sinks:
        sink.samples(kind, facts)


def remarks(rollout_id: int, metrics: Mapping[str, Any]) -> list[str]:
    """Return the sinks' remarks on a rollout, given all its metrics."""
    return [text for sink in _Stream.sinks for text in sink.remarks(rollout_id, metrics)]


def offer(ask: Callable[[Callable[..., Any]], Any]) -> None:
    """Let the sinks query the job's engines: ``ask(function)`` returns ``function(engines)``."""
    for sink in _Stream.sinks:
        sink.offer(ask)


@overload
def span(name: str, /, **fields: Any) -> Span: ...
@overload
def span(name: str, began: float, ended: float, /, **fields: Any) -> None: ...
def span(name: str, began: float | None = None, ended: float | None = None, /, **fields: Any) -> Span | None:
    """Time the body of a ``with``; or, given begin and end in seconds since the epoch, report a finished span.

    Only the seconds of ``with`` bodies are summed in :class:`Timer`.
    """
    if began is None or ended is None:
        return Span(name, fields)
    for sink in _Stream.sinks:
        sink.span(name, began, ended, fields)
    return None


class Span:
    """A span that is open for the body of a ``with``; an exception also ends it."""

    seconds = 0.0
    """Duration; set at the end."""

    def __init__(self, name: str, fields: Mapping[str, Any]) -> None:
        self._name, self._fields = name, fields

    def __enter__(self) -> Span:
        for sink in _Stream.sinks:
            sink.begin(self._name, self._fields)
        self._began, self._since = time.time(), time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._since
        Timer().add(self._name, self.seconds)
        span(self._name, self._began, self._began + self.seconds, **self._fields)


class Timer(metaclass=SingletonMeta):
    """Sums the seconds of this process's spans by name since the last reset."""

    def __init__(self) -> None:
        self._running: dict[str, Span] = {}
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    def start(self, name: str) -> None:
        """Start the span ``name``, which must not be running (as started by this method)."""
        assert name not in self._running, f"timer {name!r} is already running; end it before starting it again"
        self._running[name] = Span(name, {}).__enter__()

    def end(self, name: str) -> float:
        assert name in self._running, f"timer {name!r} is not running; running are {sorted(self._running)}"
        ended = self._running.pop(name)
        ended.__exit__()
        return ended.seconds

    def is_running(self, name: str) -> bool:
        """Return whether ``name`` was started and has not ended."""
        return name in self._running

    def add(self, name: str, elapsed_s: float) -> None:
        """Add seconds measured elsewhere."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed_s

    def seconds(self, name: str) -> float:
        """Return the sum of ``name``; 0.0 if it never ran."""
        with self._lock:
            return self._seconds.get(name, 0.0)

    def log_dict(self) -> dict[str, float]:
        with self._lock:
            return dict(self._seconds)

    def reset(self, name: str | None = None) -> None:
        """Clear the sum of ``name``, or all sums; running spans continue."""
        with self._lock:
            if name is None:
                self._seconds.clear()
            else:
                self._seconds.pop(name, None)

    def context(self, name: str) -> Span:
        return Span(name, {})


class DeviceTimes:
    """Seconds of named spans on a device: from CUDA stream events (no synchronization), else from the host's clock."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str, device: torch.device) -> Iterator[None]:
        """Add the time that ``device`` spends on the body to ``name``."""
        if device.type != "cuda":
            started_s = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - started_s)
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(device)
        begin.record(stream)
        yield
        end.record(stream)
        self._spans.append((name, begin, end))

    def seconds(self) -> dict[str, float]:
        """Return name -> seconds; waits for the spans to finish on the device."""
        for name, begin, end in self._spans:
            end.synchronize()
            self._add(name, begin.elapsed_time(end) / 1e3)
        self._spans = []
        return dict(self._seconds)

    def _add(self, name: str, elapsed_s: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + elapsed_s


class _MetricsFile(Sink):
    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, metrics: Mapping[str, Any], step_key: str) -> None:
        append_record(self._path, metrics)
