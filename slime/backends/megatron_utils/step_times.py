"""Times of an optimizer step: seconds of forward, backward, communication and the optimizer, for the run's record.

megatron-core's schedules tell a timer what begins and ends; here that is a pair of events on the device's stream, read
when the step is over.  What overlaps with a pass (a gather, a reduction) counts as the pass.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import get_model_config

from slime.backends.megatron_utils.data import current_device
from slime.observability.telemetry import DeviceTimes, span, wants

PARTS = ("forward", "backward", "communication", "optimizer")
"""In the order of their spans: sums over the micro-batches, one after the other."""
_GATHER = "params-all-gather"


class _StepTimes:
    """The timers of one step, as megatron-core calls them."""

    def __init__(self) -> None:
        self._times = DeviceTimes()
        self._open: dict[str, AbstractContextManager[None]] = {}
        self._name = ""

    def __call__(self, name: str, log_level: int | None = None) -> _StepTimes:
        self._name = name
        return self

    def start(self, barrier: bool = False) -> None:
        """Begin the timer of the last call; it waits for nobody."""
        if (part := _part_of(self._name)) is not None:
            self._open[self._name] = self._times.span(part, current_device())
            self._open[self._name].__enter__()

    def stop(self, barrier: bool = False) -> None:
        """End it."""
        if self._name in self._open:
            self._open.pop(self._name).__exit__(None, None, None)

    def optimizer(self) -> AbstractContextManager[None]:
        """Time the body as the optimizer's, gathers of parameters included."""
        return self._times.span("optimizer", current_device())

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part; waits for the device."""
        found = self._times.seconds()
        gather = found.pop(_GATHER, 0.0)
        found["communication"] = found.get("communication", 0.0) + gather
        found["optimizer"] = max(0.0, found.get("optimizer", 0.0) - gather)
        return found


def _part_of(name: str) -> str | None:
    if name in ("forward-compute", "backward-compute"):
        return name.partition("-")[0]
    if name == _GATHER:
        return name  # within the optimizer
    is_sent = any(word in name for word in ("-send", "-recv", "grads-sync", "all-reduce"))
    return "communication" if is_sent else None


@contextmanager
def recorded_step(model: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> Iterator[None]:
    """Record where the body, one optimizer step, spends its time, in a run that is recorded."""
    if not wants("details"):
        yield
        return
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    configs: list[Any] = [get_model_config(model[0]), *(part.config for part in parts)]
    times, began = _StepTimes(), time.time()
    for config in configs:
        config.timers = times
    try:
        yield
    finally:
        for config in configs:
            config.timers = None
    record_parts(times.seconds(), began, time.time())


def optimizer_time(model: Sequence[torch.nn.Module]) -> AbstractContextManager[None]:
    """Time the body as the optimizer's, in a step that is recorded."""
    timers: Any = get_model_config(model[0]).timers
    return timers.optimizer() if isinstance(timers, _StepTimes) else nullcontext()


def record_parts(seconds: dict[str, float], began: float, ended: float) -> None:
    """Record the parts of a step as spans that lie one after the other within it."""
    scale = min(1.0, (ended - began) / max(sum(seconds.values()), 1e-9))
    for name in PARTS:
        until = began + seconds.get(name, 0.0) * scale
        span(name, began, until)
        began = until
