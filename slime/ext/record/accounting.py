"""The GPU-seconds of a run by cause, from its spans: every moment of every GPU counts once, so the causes add up.

Where trainer and engines share GPUs there is one class of GPUs, else one for each.  At a moment a class has the cause
of the innermost span (the last one of ``CAUSES`` that is under way); without one, it is idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

IDLE = "idle or other"
CAUSES = (
    IDLE, "generation", "longest answer", "reward", "evaluation", "forward", "backward", "communication", "optimizer",
    "push and sleep", "save", "start and recovery",
)  # fmt: skip
"""From the outermost to the innermost.  A recovery is one throughout, whatever the trainer does again in it."""
ENGINE_SPANS = {
    "start": "start and recovery",
    "manager_recovery": "start and recovery",
    "generation": "generation",
    "longest answer": "longest answer",
    "reward": "reward",
    "evaluation": "evaluation",
    "push": "push and sleep",
}
"""Name of a span -> its cause, for the GPUs of the engines."""
TRAINER_SPANS = {
    "start": "start and recovery",
    "init": "start and recovery",
    "recovery": "start and recovery",
    "manager_recovery": "start and recovery",
    "ref_log_probs": "forward",
    "teacher_log_probs": "forward",
    "log_probs": "forward",
    "values": "forward",
    "forward": "forward",
    "backward": "backward",
    "communication": "communication",
    "optimizer": "optimizer",
    "wake_up": "push and sleep",
    "sleep": "push and sleep",
    "push": "push and sleep",
    "update_weights": "push and sleep",
    "save": "save",
    "save_model": "save",
}
"""The same for the GPUs of the trainer."""


@dataclass(frozen=True, slots=True)
class Span:
    """Work of a process; times in seconds since the epoch."""

    name: str
    process: str
    start: float
    end: float
    rollout: int | None = None


@dataclass(frozen=True, slots=True)
class GpuClass:
    """GPUs that do the same at the same time."""

    name: str
    num_gpus: int
    causes: Mapping[str, str]
    """Name of a span -> cause."""


def gpu_classes(num_trainer_gpus: int, num_engine_gpus: int, *, is_shared: bool) -> list[GpuClass]:
    """Return the classes of GPUs of a run."""
    if is_shared:
        return [GpuClass("all", max(num_trainer_gpus, num_engine_gpus), ENGINE_SPANS | TRAINER_SPANS)]
    classes = [
        GpuClass("trainer", num_trainer_gpus, TRAINER_SPANS),
        GpuClass("engines", num_engine_gpus, ENGINE_SPANS),
    ]
    return [one for one in classes if one.num_gpus]


def seconds_by_cause(
    spans: Iterable[Span], causes: Mapping[str, str], bounds: Sequence[float]
) -> list[dict[str, float]]:
    """Return, of each interval between two of ``bounds``, the seconds of each cause; they add up to the interval.

    Args:
        spans: of the first rank of each process; they may overlap.
        causes: name of a span -> cause; spans of other names do not count.
        bounds: rising times.
    """
    rank = {cause: position for position, cause in enumerate(CAUSES)}
    moments: list[tuple[float, int, int]] = [(bound, -1, 0) for bound in bounds]
    for span in spans:
        if span.name in causes and span.end > span.start:
            position = rank[causes[span.name]]
            moments += [(span.start, position, 1), (span.end, position, -1)]
    moments.sort()
    under_way = [0] * len(CAUSES)
    found: list[dict[str, float]] = []
    before = 0.0
    for now, position, change in moments:
        if found and len(found) < len(bounds) and now > before:
            current = max((i for i, count in enumerate(under_way) if count), default=0)
            found[-1][CAUSES[current]] = found[-1].get(CAUSES[current], 0.0) + now - before
        if position < 0:
            found.append({})
        else:
            under_way[position] += change
        before = now
    return found[:-1]


def gpu_seconds(spans: Sequence[Span], classes: Sequence[GpuClass], bounds: Sequence[float]) -> list[dict[str, float]]:
    """Return, of each interval, the GPU-seconds of each cause over all classes."""
    total: list[dict[str, float]] = [{} for _ in bounds[1:]]
    for one in classes:
        for interval, seconds in zip(total, seconds_by_cause(spans, one.causes, bounds), strict=True):
            for cause, value in seconds.items():
                interval[cause] = interval.get(cause, 0.0) + value * one.num_gpus
    return total
