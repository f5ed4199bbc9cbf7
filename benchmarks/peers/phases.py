"""Reads the phases of a step from both sides' logs, and makes one table."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

Steps = list[dict[str, float]]
"""For each step in order: name of a span -> seconds; ``end`` is the time at which the step's record was seen."""
COLUMNS = ["seconds", "slime", "verl", "verl / slime", "ahead"]
EQUAL = 0.03
"""Sides that differ by less count as equal."""


@dataclass(frozen=True)
class Phase:
    """A row of the table: the spans of each side that belong to it."""

    label: str
    slime: tuple[str, ...]
    verl: tuple[str, ...]
    absent: Mapping[str, str]
    """Side -> the text of its cell if none of its spans was logged."""


PHASES = (
    Phase("generation, as the driver waits for it", ("wait_for_rollout",), ("gen",), {}),
    Phase("old log-probs", ("log_probs",), ("old_log_prob",), {"slime": "left out", "verl": "left out"}),
    Phase("reference log-probs", ("ref_log_probs",), ("ref",), {}),
    Phase("rewards and advantages", ("advantages",), ("reward", "adv"), {}),
    Phase("update", ("actor_train",), ("update_actor",), {}),
    Phase("trainer wakes and sleeps", ("wake_up", "sleep"), (), {"slime": "stays awake", "verl": "stays awake"}),
    Phase("push, the engine's waking included", ("push",), ("update_weights",), {}),
)
LATE = ("sleep",)
"""Spans of slime that are in the next step's record."""


def read_slime(path: Path) -> Steps:
    """Return the finished steps of slime's ``metrics.jsonl``."""
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    for line in _lines(path):
        if "rollout/step" in line:
            rows[line["rollout/step"]].update(line)
    steps = []
    for number, row in sorted(rows.items()):
        if "perf/time_step_s" not in row:
            continue
        spans = {key[10:-2]: value for key, value in row.items() if key.startswith("perf/time_") and key[-2:] == "_s"}
        late = {name: rows.get(number + 1, {}).get(f"perf/time_{name}_s") for name in LATE}
        spans = {key: value for key, value in spans.items() if key not in LATE}
        spans |= {name: value for name, value in late.items() if value is not None}
        if "perf/train_peak_memory_gib" in row:
            spans["peak_gib"] = row["perf/train_peak_memory_gib"]
        steps.append(spans)
    return steps


def read_verl(path: Path) -> Steps:
    """Return the steps of the file that verl's logger ``file`` writes."""
    steps = []
    for line in _lines(path):
        data = line["data"]
        spans = {key.removeprefix("timing_s/"): data[key] for key in data if key.startswith("timing_s/")}
        if "step" in spans:
            peak = data.get("perf/max_memory_allocated_gb")
            steps.append(spans if peak is None else spans | {"peak_gib": peak})
    return steps


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file that may still grow; none if there is no file."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1] if line]


def table(slime: Steps, verl: Steps, warm_up: int, tokens: int) -> dict[str, Any]:
    """Return title, columns and rows: means in seconds over the steps after the first ``warm_up``.

    A whole step lasts from one step's end to the next by the observer's clock, the same for both sides;
    time in no phase is the rest.

    Args:
        slime: the steps of one side; empty if it failed.
        verl: the steps of the other.
        warm_up: number of unmeasured steps, at least one, because the first has no beginning.
        tokens: response tokens of a step.
    """
    sides = {"slime": slime, "verl": verl}
    measured = {name: steps[warm_up:] for name, steps in sides.items()}
    rows: list[list[Any]] = []
    known = {"slime": 0.0, "verl": 0.0}
    for phase in PHASES:
        cells: dict[str, float | str | None] = {}
        for name, steps in measured.items():
            seconds = _seconds(steps, getattr(phase, name))
            known[name] += seconds or 0.0
            cells[name] = phase.absent.get(name) if seconds is None and steps else seconds
        rows.append(_row(phase.label, **cells))
    whole = {name: _whole(steps, warm_up) for name, steps in sides.items()}
    rest = {name: None if s is None else max(0.0, s - known[name]) for name, s in whole.items()}
    rate = {name: None if s is None else tokens / s for name, s in whole.items()}
    peaks = {name: [step["peak_gib"] for step in steps if "peak_gib" in step] for name, steps in measured.items()}
    rows += [
        _row("rest", **rest),
        _row("**whole step**", **whole),
        _row("response tokens a second", **rate, digits=0, more_is_better=True),
        _row("peak that torch allocated, GiB", **{name: max(of, default=None) for name, of in peaks.items()}),
        ["steps measured", len(measured["slime"]), len(measured["verl"]), "", ""],
    ]
    return {"title": "Means of the measured steps", "columns": COLUMNS, "rows": rows}


def _seconds(steps: Steps, spans: Sequence[str]) -> float | None:
    """Return the mean over the steps of the sum of some spans, for the steps that have any; None if none has."""
    means = [mean(of) for span in spans if (of := [step[span] for step in steps if span in step])]
    return sum(means) if means else None


def _whole(steps: Steps, warm_up: int) -> float | None:
    """Return the seconds from the end of one step to that of the next."""
    if len(steps) <= warm_up:
        return None
    return (steps[-1]["end"] - steps[warm_up - 1]["end"]) / (len(steps) - warm_up)


def _row(
    label: str, slime: float | str | None, verl: float | str | None, *, digits: int = 2, more_is_better: bool = False
) -> list[Any]:
    """Return a row; for two numbers it gives their ratio and which side is faster."""
    row: list[Any] = [label]
    for cell in (slime, verl):
        row.append("-" if cell is None else cell if isinstance(cell, str) else round(cell, digits or None))
    if not (isinstance(slime, float) and isinstance(verl, float) and slime > 0 and verl > 0):
        return [*row, "", ""]
    ratio = verl / slime
    ahead = "slime" if (ratio < 1) == more_is_better else "verl"
    return [*row, round(ratio, 2), "equal" if abs(ratio - 1) < EQUAL else ahead]


def markdown(made: Mapping[str, Any]) -> str:
    """Return a table as Markdown."""
    lines = [made["columns"], ["---"] * len(made["columns"]), *made["rows"]]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
