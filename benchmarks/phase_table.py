"""Measured phases as a table: seconds, share of the step, and the ratio to a bare baseline of the same run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    label: str
    measured: str
    """Name of the span in the stopwatch."""
    bare: str | None = None
    """Name of the span of the least work needed; None if the phase is only our own code."""
    bare_label: str = ""
    depth: int = 0
    """0: a phase, a summand of the step.  1: a part of the phase above it, or an intermediate to its bare time."""


@dataclass
class Stopwatch:
    """name -> seconds of each repetition, in their order."""

    spans: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, elapsed_s: float) -> None:
        """Record one repetition."""
        self.spans[name].append(elapsed_s)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Time the body as one repetition of ``name``."""
        started = perf_counter()
        yield
        self.add(name, perf_counter() - started)

    def clear(self) -> None:
        """Discard all repetitions, after the warm-up."""
        self.spans.clear()


def median_ratio(seconds: Sequence[float], bare_s: Sequence[float]) -> float:
    """The median over repetitions of each one's ratio, so that slowdowns of a whole repetition cancel."""
    return median(ours / theirs for ours, theirs in zip(seconds, bare_s, strict=True))


def step_seconds(rows: Sequence[Row], spans: Mapping[str, Sequence[float]]) -> tuple[list[float], list[float]]:
    """For each repetition: the sum of all phases, and the sum of their bare costs, where there is one."""
    phases = [row for row in rows if row.depth == 0]
    whole = [sum(values) for values in zip(*(spans[row.measured] for row in phases), strict=True)]
    bare_rows = [spans[row.bare] for row in phases if row.bare is not None]
    return whole, [sum(values) for values in zip(*bare_rows, strict=True)]


def _ms(seconds: Sequence[float]) -> str:
    return f"{1000 * median(seconds):,.1f}"


def format_table(rows: Sequence[Row], spans: Mapping[str, Sequence[float]]) -> str:
    """The table as Markdown, with aligned columns; the last line is the whole step.

    Times are medians over repetitions, in milliseconds; a share is of the median step; for a ratio see
    :func:`median_ratio`.
    """
    whole, bare = step_seconds(rows, spans)
    step_s = median(whole)
    lines = [("phase", "ms", "of step", "bare ms", "ratio", "what bare is")]
    for row in rows:
        ours = spans[row.measured]
        label = ("- " if row.depth else "") + row.label
        cells = [label, _ms(ours), f"{median(ours) / step_s:.1%}"]
        if row.bare is None:
            cells += ["", "", row.bare_label]
        else:
            theirs = spans[row.bare]
            cells += [_ms(theirs), f"{median_ratio(ours, theirs):.2f}", row.bare_label]
        lines.append(tuple(cells))
    lines.append(("**step**", _ms(whole), "100.0%", _ms(bare), f"{median_ratio(whole, bare):.2f}", "their sum"))
    return _aligned(lines)


def _aligned(lines: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table: text left-aligned, numbers right-aligned."""
    is_text = (True, False, False, False, False, True)
    widths = [max(len(line[column]) for line in lines) for column in range(len(is_text))]

    def one(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if left else cell.rjust(width) for cell, width, left in zip(cells, widths, is_text)
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * width if left else "-" * (width - 1) + ":" for width, left in zip(widths, is_text)]
    return "\n".join([one(lines[0]), one(rule), *map(one, lines[1:])])
