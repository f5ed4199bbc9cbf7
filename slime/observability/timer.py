"""Named wall-clock spans, in seconds, summed over a step.

    with timer("train"): ...            @timer            Timer().start("train_wait") ... Timer().end("train_wait")

``Timer().log_dict()`` gives the sums; ``reset()`` begins the next step.  ``DeviceTimes`` is the same for a device.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from slime.utils.misc import SingletonMeta


class Timer(metaclass=SingletonMeta):
    """The spans of this process.  A name is running at most once at a time."""

    def __init__(self) -> None:
        self._started: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()
        self.on_end: Callable[[str, float, float], None] | None = None
        """Called with name, start and end of each span, in seconds since the epoch."""

    def start(self, name: str) -> None:
        """Begin the span ``name``; it must not be running."""
        with self._lock:
            assert name not in self._started, f"timer {name!r} is already running; end it before it is started again"
            self._started[name] = time.perf_counter()

    def end(self, name: str) -> float:
        """End the span, add it to the sum of ``name`` and return its seconds."""
        with self._lock:
            assert name in self._started, f"timer {name!r} is not running; running are {sorted(self._started)}"
            elapsed_s = time.perf_counter() - self._started.pop(name)
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed_s
        if self.on_end is not None:
            now = time.time()
            self.on_end(name, now - elapsed_s, now)
        return elapsed_s

    def is_running(self, name: str) -> bool:
        """Return whether ``name`` was started and not yet ended."""
        with self._lock:
            return name in self._started

    def add(self, name: str, elapsed_s: float) -> None:
        """Add seconds that were measured elsewhere."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed_s

    def seconds(self, name: str) -> float:
        """Return the sum of ``name`` since the last reset; 0.0 when it never ran."""
        with self._lock:
            return self._seconds.get(name, 0.0)

    def log_dict(self) -> dict[str, float]:
        """Return name -> seconds since the last reset."""
        with self._lock:
            return dict(self._seconds)

    def reset(self, name: str | None = None) -> None:
        """Forget the sum of ``name``, or all sums.  Running spans go on."""
        with self._lock:
            if name is None:
                self._seconds.clear()
            else:
                self._seconds.pop(name, None)

    @contextmanager
    def context(self, name: str) -> Iterator[None]:
        """Time the body of a ``with``; an exception inside ends the span too."""
        self.start(name)
        try:
            yield
        finally:
            self.end(name)


def timer(name_or_function: str | Callable[..., Any]) -> Any:
    """Time ``with timer("name")``, ``@timer("name")``, or ``@timer`` (the function's name is the span's)."""
    if isinstance(name_or_function, str):
        return Timer().context(name_or_function)
    function = name_or_function

    @functools.wraps(function)
    def timed(*positional: Any, **keyword: Any) -> Any:
        with Timer().context(function.__name__):
            return function(*positional, **keyword)

    return timed


@contextmanager
def inverse_timer(name: str) -> Iterator[None]:
    """Stop the running span ``name`` for the body, which is not counted."""
    Timer().end(name)
    try:
        yield
    finally:
        Timer().start(name)


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
