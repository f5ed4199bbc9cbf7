"""Seconds that a device spends on named parts of its work, summed without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class DeviceTimes:
    """Sums of spans by name: by the events of a GPU's stream, or by the host's clock."""

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
