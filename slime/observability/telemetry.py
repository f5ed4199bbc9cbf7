"""The one stream of a process: spans, events and metrics, which its sinks take.

    with span("push"): ...                     a span; its seconds are summed by name for the metrics of the step
    span("step", began, ended, rollout=3)      work that is over, in seconds since the epoch; not summed
    event("save", rollout=3)                   something happened now
    log(metrics, step_key="train/step")        a record of metrics

``start`` opens the sinks: ``metrics.jsonl``, and beside it those that the composition root chooses
(``slime.ray.parts.Parts.sinks``).  Another sink is a subclass of :class:`Sink`.
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

from slime.flags.observability import tracking_config
from slime.observability.metrics_file import START_KEY, append_record, metrics_path
from slime.utils.misc import SingletonMeta
from slime.utils.redaction import hide_values

logger = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 30.0
"""For a sink to write what it holds."""


class Sink:
    """Takes what it wants of the stream of one process; these methods take nothing.

    None of them may change what it is given or delay a step.  They are called in any thread.
    """

    wants: ClassVar[tuple[str, ...]] = ()
    """What else a trainer reports for it: ``details``, the parts of a step, samples and digests of the weights;
    ``ranks``, metrics of every rank."""

    def log(self, metrics: Mapping[str, Any], step_key: str) -> None:
        """Take a record of metrics; ``metrics[step_key]`` is its place on the axis."""

    def begin(self, name: str, fields: Mapping[str, Any]) -> None:
        """Note that a span begins, unless it is reported after its end."""

    def span(self, name: str, began: float, ended: float, fields: Mapping[str, Any]) -> None:
        """Take a span; times in seconds since the epoch."""

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Take an event."""

    def samples(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Take samples, of a kind that :func:`samples` lists."""

    def remarks(self, rollout_id: int, metrics: Mapping[str, Any]) -> Sequence[str]:
        """Return what is to be said about a rollout, all of whose metrics are given."""
        return ()

    def offer(self, ask: Callable[[Callable[..., Any]], Any]) -> None:
        """Note that ``ask(function)`` returns, at any time, what a function returns of the job's engines."""

    def flush(self) -> None:
        """Write what is held, within ``FLUSH_TIMEOUT_S``."""

    def close(self) -> None:
        """Write what is held and close; nothing follows."""


class _Stream:
    args: Namespace | None = None
    sinks: tuple[Sink, ...] = ()
    wants: frozenset[str] = frozenset()
    values_of_the_run: dict[str, Any] = {}  # noqa: RUF012  one process, one run


def start(args: Namespace, process: str, sinks: Sequence[type[Sink]] = (), *, primary: bool = False) -> dict[str, Any]:
    """Open the sinks of this process.

    Args:
        args: the run's arguments, complete or not.
        sinks: those beside ``metrics.jsonl``, each made with ``args``, ``process`` and ``primary``; a run without a
            folder has none.
        primary: True in the driver.

    Returns:
        :func:`values_of_the_run`.

    Raises:
        Exception: of a sink that cannot open; those before it are closed.
    """
    stop()
    values: dict[str, Any] = {}
    if primary and tracking_config(args).wandb_run_id is None:
        # For every process: a run without --save names its folder after it.
        values["wandb_run_id"] = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    args = Namespace(**{**vars(args), **values})
    hide_values(args)
    _Stream.args, _Stream.values_of_the_run = args, values
    config = tracking_config(args)
    path = metrics_path(config)
    if path is not None:
        if primary:  # so that a reader can tell a resume from a first start
            append_record(path, {START_KEY: config.wandb_run_id})
        _Stream.wants = frozenset(what for sink in sinks for what in sink.wants)
        _Stream.sinks = (_MetricsFile(path),)
        try:
            for sink in sinks:
                _Stream.sinks = (*_Stream.sinks, sink(args, process, primary=primary))  # type: ignore[call-arg]
        except BaseException:
            _close_sinks()  # alone: the error's text is still searched for the run's secrets
            raise
    atexit.register(stop)
    return values


def is_open() -> bool:
    """Return whether :func:`start` was called in this process, and not yet :func:`stop`."""
    return _Stream.args is not None


def values_of_the_run() -> dict[str, Any]:
    """Return what the driver made up for the run (``wandb_run_id``); the other processes need it.  Empty elsewhere."""
    return _Stream.values_of_the_run


def stop() -> None:
    """Flush and close the sinks of this process; safe to call twice."""
    _close_sinks()
    _Stream.args, _Stream.wants = None, frozenset()
    hide_values(Namespace())


def _close_sinks() -> None:
    sinks, _Stream.sinks = _Stream.sinks, ()
    with ExitStack() as closing:  # all of them, also where one fails
        for sink in reversed(sinks):
            closing.callback(sink.close)


def flush() -> None:
    """Have the sinks write what they hold: this process may be killed from here on."""
    for sink in _Stream.sinks:
        sink.flush()


def wants(what: str) -> bool:
    """Return whether a sink has ``what`` in its ``wants``; all processes of a run know the same."""
    return what in _Stream.wants


def log(metrics: Mapping[str, Any], step_key: str, args: Namespace | None = None) -> None:
    """Send one record to every sink.

    A sink whose disk is full loses the record, which is logged; training continues.

    Args:
        args: of the run, in a process that may not have called :func:`start`.
    """
    if step_key not in metrics:
        raise KeyError(f"metrics have no {step_key!r}, the step that they belong to; they have {sorted(metrics)}")
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
    """Report that something happened, now."""
    for sink in _Stream.sinks:
        sink.event(name, fields)


def samples(kind: str, **facts: Any) -> None:
    """Give samples to the sinks.

    rollout      rollout_id, samples by position, rewards as the estimator takes them or None, is_loaded where the
                 samples come from a dump or from before a restart
    dropped      samples, the reason of a filter
    evaluation   rollout_id before it (None before all), data: data set -> its results
    trained      rollout_id, data-parallel rank, positions, columns: name -> host tensors, micro_batches
    """
    for sink in _Stream.sinks:
        sink.samples(kind, facts)


def remarks(rollout_id: int, metrics: Mapping[str, Any]) -> list[str]:
    """Return what the sinks have to say about a rollout, all of whose metrics are given."""
    return [text for sink in _Stream.sinks for text in sink.remarks(rollout_id, metrics)]


def offer(ask: Callable[[Callable[..., Any]], Any]) -> None:
    """Let the sinks ask about the job's engines: ``ask(function)`` returns what the function returns of them."""
    for sink in _Stream.sinks:
        sink.offer(ask)


@overload
def span(name: str, /, **fields: Any) -> Span: ...
@overload
def span(name: str, began: float, ended: float, /, **fields: Any) -> None: ...
def span(name: str, began: float | None = None, ended: float | None = None, /, **fields: Any) -> Span | None:
    """Time the body of a ``with``; with both moments, in seconds since the epoch, report a span that is over.

    Only the seconds of a body are summed in :class:`Timer`.
    """
    if began is None or ended is None:
        return Span(name, fields)
    for sink in _Stream.sinks:
        sink.span(name, began, ended, fields)
    return None


class Span:
    """A span that is open for the body of a ``with``; an exception in it ends the span too."""

    seconds = 0.0
    """Known at the end."""

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
    """The seconds of this process's spans, summed by name since the last reset."""

    def __init__(self) -> None:
        self._running: dict[str, Span] = {}
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    def start(self, name: str) -> None:
        """Begin the span ``name``; none of this name may be running that was begun so."""
        assert name not in self._running, f"timer {name!r} is already running; end it before it is started again"
        self._running[name] = Span(name, {}).__enter__()

    def end(self, name: str) -> float:
        assert name in self._running, f"timer {name!r} is not running; running are {sorted(self._running)}"
        ended = self._running.pop(name)
        ended.__exit__()
        return ended.seconds

    def is_running(self, name: str) -> bool:
        """Return whether ``name`` was started and not yet ended."""
        return name in self._running

    def add(self, name: str, elapsed_s: float) -> None:
        """Add seconds that were measured elsewhere."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed_s

    def seconds(self, name: str) -> float:
        """Return the sum of ``name``; 0.0 when it never ran."""
        with self._lock:
            return self._seconds.get(name, 0.0)

    def log_dict(self) -> dict[str, float]:
        with self._lock:
            return dict(self._seconds)

    def reset(self, name: str | None = None) -> None:
        """Forget the sum of ``name``, or all sums; running spans stay."""
        with self._lock:
            if name is None:
                self._seconds.clear()
            else:
                self._seconds.pop(name, None)

    def context(self, name: str) -> Span:
        return Span(name, {})


class DeviceTimes:
    """Seconds of named spans on a device: by the events of a GPU's stream, without a wait, or by the host's clock."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str, device: torch.device) -> Iterator[None]:
        """Add to ``name`` what ``device`` does for the body."""
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
        """Return the sums; waits for the spans' ends."""
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
