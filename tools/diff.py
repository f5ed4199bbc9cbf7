"""Say how two runs differ: in settings, in versions, and from which step on in samples and numbers.

    slime diff RUN_A RUN_B [--html FILE]

Exits with 0 if everything recorded is equal, with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.ext.record.run_reader import Run, read_run
from slime.ext.record.sample_record import rollout_of
from tools.cli import clean_exit
from tools.report import source_hash, time_of, write_page
from tools.terminal import plain, say

OWN = {"save", "load", "save_hf", "run_folder", "wandb_run_id", "wandb_dir", "job_secret", "tensorboard_dir"}
"""Settings that differ between any two runs."""
COLUMNS = (
    ("data order", "prompt"), ("sampled tokens", "tokens"), ("reward", "reward"), ("loss mask", "loss_mask"),
    ("packing", "packing"), ("engine's log-probs", "engine_log_probs"), ("trainer's log-probs", "trainer_log_probs"),
    ("advantages", "advantages"),
)  # fmt: skip
"""The columns of a rollout's samples that are compared, each before those that follow from it."""
OF_TRAINER = ("packing", "trainer_log_probs", "advantages")
METRICS = (
    "train/critic-value_loss", "train/critic-grad_norm", "train/lr-pg_0", "train/loss", "train/kl_loss",
    "train/entropy_loss", "train/grad_norm",
)  # fmt: skip
CRITIC_WEIGHTS, WEIGHTS = "critic's weights", "weights"
CURVES = (
    "rollout/raw_reward", "rollout/response_len/mean", "train/loss", "train/grad_norm", "train/kl_loss",
    "train/entropy_loss", "train/train_rollout_logprob_abs_diff", "perf/time_step_s",
)  # fmt: skip
WIDTH, HEIGHT, MARGIN = 420, 130, 6
STYLE = """
:root { color-scheme: light dark; --a: light-dark(#0b6fb8, #62b5f0); --b: light-dark(#b4540a, #f0a35c); }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; } caption { text-align: left; font-weight: 600; }
th, td { text-align: left; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #8886; vertical-align: top; }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
figure { display: inline-block; margin: .5rem 1.5rem 1rem 0; } figcaption { font-size: .9em; }
svg { display: block; max-width: 100%; background: #8881; } polyline { fill: none; stroke-width: 1.5; }
.a { stroke: var(--a); color: var(--a); } .b { stroke: var(--b); color: var(--b); stroke-dasharray: 5 3; }
.d { stroke: currentColor; }
"""
Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, names of columns, rows."""
Curve = Mapping[int, float]
"""Step -> value."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs=2, metavar="RUN", help="The folder of a run.")
    parser.add_argument("--html", type=Path, metavar="FILE", help="Also write a page, with the curves drawn.")
    options = parser.parse_args(argv)
    with clean_exit():
        first, second = (read_run(folder) for folder in options.runs)
    settings, steps = list(setting_differences(first, second)), list(first_differences(first, second))
    curves = _curves(first, second)
    ends = [(name, *(_first_to_last(curve) for curve in pair)) for name, pair in curves.items()]
    tables = [
        ("settings and versions", ("name", "A", "B"), settings),
        ("first differences", ("what", "step", "largest difference"), steps),
        ("seconds of a GPU by cause", ("cause", "A", "B"), _times(first, second)),
        ("curves: first -> last", ("metric", "A", "B"), ends),
    ]
    for table in tables:
        _print(*table)
    if options.html is not None:
        with clean_exit():
            page = page_of([str(folder) for folder in options.runs], tables, curves)
            write_page(options.html, page, flag="--html")
        say(f"page: {options.html}")
    if not settings and not steps:
        say("The runs differ in nothing that was recorded.")
    raise SystemExit(1 if settings or steps else 0)


def _print(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    shown = [head, *([plain(cell)[:60] for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(head))]
    say(f"== {title}")
    for row in shown:
        say("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    say()


def setting_differences(first: Run, second: Run) -> Iterator[tuple[str, str, str]]:
    """Yield name and both values of each differing setting, version and commit; ``critic_args.lr`` is the critic's."""
    for part in ("values", "versions", "git"):
        ours, theirs = first.config.get(part, {}), second.config.get(part, {})
        for name in sorted(ours.keys() | theirs.keys()):
            a, b = (one.get(name) for one in (ours, theirs))
            if part == "values":
                a, b = (one and one["value"] for one in (a, b))
            yield from _value_differences(name, a, b)


def _value_differences(name: str, a: Any, b: Any) -> Iterator[tuple[str, str, str]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            yield from _value_differences(f"{name}.{key}", a.get(key), b.get(key))
    elif a != b and not _is_own(name):
        yield name, str(a), str(b)


def _is_own(name: str) -> bool:
    """Return whether a setting, of the run or of its critic, differs between any two runs."""
    table, _, last = name.rpartition(".")
    return last in OWN and table in ("", "critic_args", "critic_args.role_overrides")


def first_differences(first: Run, second: Run) -> Iterator[tuple[str, str, str]]:
    """Yield the first step (counted from 1) at which each compared quantity differs, and by how much."""
    left = dict(COLUMNS)
    common = {rollout_of(path) for path in first.sample_files()}
    found: list[tuple[int, int, str, str]] = []
    for rollout_id in sorted(common & {rollout_of(path) for path in second.sample_files()}):
        ours, theirs = (_by_position(run, rollout_id) for run in (first, second))
        for what, column in list(left.items()):
            pair = [[row.get(column) for row in rows] for rows in (ours, theirs)]
            if column in OF_TRAINER and not all(any(value is not None for value in one) for one in pair):
                continue  # one run has no such record of it
            difference = _difference(*pair)
            if difference is not None:
                found.append((rollout_id, list(dict(COLUMNS)).index(what), what, difference))
                del left[what]
    ours, theirs = _by_rollout(first), _by_rollout(second)
    for place, name in enumerate((*METRICS, CRITIC_WEIGHTS, WEIGHTS), start=len(COLUMNS)):
        for rollout_id in sorted(ours.keys() & theirs.keys()):
            pair = [[step[name] for step in one[rollout_id] if name in step] for one in (ours, theirs)]
            difference = _difference(*pair)
            if difference is not None:
                found.append((rollout_id, place, name, difference))
                break
    for step, _, what, difference in sorted(found):
        yield what, str(step + 1), difference


def _by_rollout(run: Run) -> dict[int, list[dict[str, Any]]]:
    """Return rollout -> the metrics of its optimizer steps, followed by the digests of the weights after them."""
    found: dict[int, list[dict[str, Any]]] = {}
    for step in sorted(run.steps):
        found.setdefault(step // run.steps_per_rollout, []).append(run.steps[step])
    for name, digests in ((CRITIC_WEIGHTS, run.critic_digests), (WEIGHTS, run.digests)):
        for rollout_id, digest in digests.items():
            found.setdefault(rollout_id, []).append({name: digest})
    return found


def _by_position(run: Run, rollout_id: int) -> list[dict[str, Any]]:
    kept = [row for row in run.samples(rollout_id) if row["position"] is not None]
    for row in kept:
        if (micro_batch := row.get("micro_batch")) is not None:
            row["packing"] = [row.get("dp_rank"), micro_batch]
    return sorted(kept, key=lambda row: row["position"])


def _difference(a: Any, b: Any) -> str | None:
    """Return the difference of two values in words; None if they are equal."""
    if _is_same(a, b):
        return None
    flat_a, flat_b = list(_flat(a)), list(_flat(b))
    numbers = [(x, y) for x, y in zip(flat_a, flat_b) if isinstance(x, int | float) and isinstance(y, int | float)]
    count = sum(not _is_same(x, y) for x, y in zip(flat_a, flat_b))
    if len(flat_a) != len(flat_b):
        return f"{len(flat_a)} and {len(flat_b)} values"
    if numbers and len(numbers) == len(flat_a):
        largest = max((abs(x - y) for x, y in numbers if not _is_same(x, y)), default=0.0)
        return f"{largest:.3g} ({count} of {len(flat_a)} values)"
    return f"{count} of {len(flat_a)} values"


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two values are equal; NaN equals NaN."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return a == b or (a != a and b != b)


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


def _curves(first: Run, second: Run) -> dict[str, tuple[dict[int, float], dict[int, float]]]:
    """Return metric -> (step -> value) of each run."""
    evaluations = sorted({name for m in first.evaluations.values() for name in m if name.count("/") == 1})
    curves = {}
    for name in (*CURVES, *(name for name in evaluations if name != "eval/step")):
        pair = []
        for run in (first, second):
            kinds = {"eval": run.evaluations, "train": run.steps}
            steps = kinds.get(name.partition("/")[0], run.rollouts)
            pair.append({n + 1: m[name] for n, m in sorted(steps.items()) if isinstance(m.get(name), int | float)})
        if any(pair):
            curves[name] = (pair[0], pair[1])
    return curves


def _first_to_last(curve: dict[int, float]) -> str:
    values = list(curve.values())
    return f"{values[0]:.4g} -> {values[-1]:.4g}" if values else ""


# The page: plain HTML and SVG, without a script


def page_of(names: Sequence[str], tables: Sequence[Table], curves: Mapping[str, tuple[Curve, Curve]]) -> str:
    """Return the page.

    Args:
        names: names of the two runs.
        tables: an empty one gets a line that says so.
        curves: metric -> curve of the first run and of the second.
    """
    first, second = (html.escape(name) for name in names)
    policy = f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src {source_hash(STYLE)}"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{first} and {second}</title><style>{STYLE}</style></head><body><main>",
        f'<h1><span class="a">A</span> {first}, <span class="b">B</span> {second}</h1>',
        *(_table(*table) for table in tables),
        "<h2>Curves</h2><p>A is solid, B is dashed; below them B - A.</p>",
        *(_figure(name, *pair) for name, pair in curves.items()),
        "</main></body></html>",
    ]
    return "\n".join(parts)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return f"<h2>{html.escape(title)}</h2><p>Nothing differs.</p>"
    names = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    table = f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"
    return f'<h2>{html.escape(title)}</h2><div class="wide" tabindex="0">{table}</div>'


def _figure(name: str, first: Curve, second: Curve) -> str:
    difference = {step: second[step] - first[step] for step in sorted(first.keys() & second.keys())}
    largest = max((abs(value) for value in difference.values()), default=0.0)
    said = f"{html.escape(name)}: B - A is at most {largest:.4g}"
    shown = _svg(said, {"a": first, "b": second}, HEIGHT) + _svg(
        f"{said} (difference)", {"d": difference}, HEIGHT // 2
    )
    return f"<figure>{shown}<figcaption>{said}</figcaption></figure>"


def _svg(label: str, lines: Mapping[str, Curve], height: int) -> str:
    """Draw lines over their common range of steps and values."""
    steps = [step for line in lines.values() for step in line]
    values = [value for line in lines.values() for value in line.values()]
    if not steps:
        return ""
    low, span = min(values), max(values) - min(values) or 1.0
    begin, length = min(steps), max(steps) - min(steps) or 1
    drawn = ""
    for name, line in lines.items():
        points = " ".join(
            f"{MARGIN + (step - begin) / length * (WIDTH - 2 * MARGIN):.1f},"
            f"{height - MARGIN - (line[step] - low) / span * (height - 2 * MARGIN):.1f}"
            for step in sorted(line)
        )
        drawn += f'<polyline class="{name}" points="{points}"/>'
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg {size} role="img" aria-label="{label}">{drawn}</svg>'


if __name__ == "__main__":
    main()
