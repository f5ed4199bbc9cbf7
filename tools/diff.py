"""Say in what two runs differ: settings, versions, and the first step at which samples or numbers do.

    python tools/diff.py RUN_A RUN_B

Exits with 0 when nothing that was recorded differs, with 1 when something does.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.observability.run_reader import Run, read_run
from tools.cli import clean_exit
from tools.report import time_of

OWN = {"save", "load", "save_hf", "run_folder", "wandb_run_id", "wandb_dir", "job_secret", "tensorboard_dir"}
"""Settings that every run has to itself."""
COLUMNS = (
    ("data order", "prompt"), ("sampled tokens", "tokens"), ("reward", "reward"), ("loss mask", "loss_mask"),
    ("engine's log-probs", "engine_log_probs"), ("trainer's log-probs", "trainer_log_probs"),
    ("advantages", "advantages"),
)  # fmt: skip
"""What is compared of the samples of a rollout, in the order in which one follows from the other."""
METRICS = ("train/loss", "train/grad_norm", "train/kl_loss", "train/entropy_loss", "train/lr-pg_0")
CURVES = ("rollout/raw_reward", "rollout/response_len/mean", "perf/time_step_s")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs=2, metavar="RUN", help="The folder of a run.")
    options = parser.parse_args(argv)
    with clean_exit():
        first, second = (read_run(folder) for folder in options.runs)
    settings, steps = list(setting_differences(first, second)), list(first_differences(first, second))
    _print("settings and versions", ("name", "A", "B"), settings)
    _print("first differences", ("what", "step", "largest difference"), steps)
    _print("seconds of a GPU by cause", ("cause", "A", "B"), _times(first, second))
    _print("curves: first -> last", ("metric", "A", "B"), _curves(first, second))
    if not settings and not steps:
        print("The runs differ in nothing that was recorded.")
    raise SystemExit(1 if settings or steps else 0)


def _print(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    shown = [head, *([str(cell)[:60] for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(head))]
    print(f"== {title}")
    for row in shown:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print()


def setting_differences(first: Run, second: Run) -> Iterator[tuple[str, str, str]]:
    """Yield name and both values of settings, versions and commit that differ."""
    for part in ("values", "versions", "git"):
        ours, theirs = first.config.get(part, {}), second.config.get(part, {})
        for name in sorted(ours.keys() | theirs.keys()):
            a, b = (one.get(name) for one in (ours, theirs))
            if part == "values":
                a, b = (one and one["value"] for one in (a, b))
            if a != b and name not in OWN:
                yield name, str(a), str(b)


def first_differences(first: Run, second: Run) -> Iterator[tuple[str, str, str]]:
    """Yield, of everything that is compared, the first step (from 1) at which it differs, and by how much."""
    left = dict(COLUMNS)
    common = {int(path.stem.split("_")[1]) for path in first.sample_files()}
    found: list[tuple[int, int, str, str]] = []
    for rollout_id in sorted(common & {int(path.stem.split("_")[1]) for path in second.sample_files()}):
        ours, theirs = (_by_position(run, rollout_id) for run in (first, second))
        for what, column in list(left.items()):
            difference = _difference([row.get(column) for row in ours], [row.get(column) for row in theirs])
            if difference is not None:
                found.append((rollout_id, list(dict(COLUMNS)).index(what), what, difference))
                del left[what]
    for place, name in enumerate(METRICS, start=len(COLUMNS)):
        for step in sorted(first.steps.keys() & second.steps.keys()):
            difference = _difference(first.steps[step].get(name), second.steps[step].get(name))
            if difference is not None:
                found.append((step, place, name, difference))
                break
    for step, _, what, difference in sorted(found):
        yield what, str(step + 1), difference


def _by_position(run: Run, rollout_id: int) -> list[dict[str, Any]]:
    kept = (row for row in run.samples(rollout_id) if row["position"] is not None)
    return sorted(kept, key=lambda row: row["position"])


def _difference(a: Any, b: Any) -> str | None:
    """Return in words how two values differ; None where they are equal."""
    if a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)):
        return None
    flat_a, flat_b = list(_flat(a)), list(_flat(b))
    numbers = [(x, y) for x, y in zip(flat_a, flat_b) if isinstance(x, int | float) and isinstance(y, int | float)]
    count = sum(x != y for x, y in zip(flat_a, flat_b))
    if len(flat_a) != len(flat_b):
        return f"{len(flat_a)} and {len(flat_b)} values"
    if numbers and len(numbers) == len(flat_a):
        return f"{max(abs(x - y) for x, y in numbers):.3g} ({count} of {len(flat_a)} values)"
    return f"{count} of {len(flat_a)} values"


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for one in value:
            yield from _flat(one)
    else:
        yield value


def _times(first: Run, second: Run) -> list[tuple[str, str, str]]:
    totals = [time_of(run)["total"] for run in (first, second)]
    names = dict.fromkeys([*totals[0], *totals[1]])
    return [(name, *(f"{total.get(name, 0.0):.1f}" for total in totals)) for name in names]


def _curves(first: Run, second: Run) -> list[tuple[str, str, str]]:
    evaluations = sorted({name for m in first.evaluations.values() for name in m if name.count("/") == 1})
    rows = []
    for name in (*CURVES, *(name for name in evaluations if name != "eval/step")):
        shown = []
        for run in (first, second):
            steps = run.evaluations if name.startswith("eval/") else run.rollouts
            values = [m[name] for m in steps.values() if isinstance(m.get(name), int | float)]
            shown.append(f"{values[0]:.4g} -> {values[-1]:.4g}" if values else "")
        if any(shown):
            rows.append((name, *shown))
    return rows


if __name__ == "__main__":
    main()
