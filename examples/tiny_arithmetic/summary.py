"""Summarizes a finished run: curves in the terminal and as a PNG, accuracy, and the paths of its models.

    python examples/tiny_arithmetic/summary.py runs/tiny/grpo-seed1

Everything is read from ``metrics.jsonl`` in the run's ``--save`` folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slime.observability.metrics_file import FILE_NAME, START_KEY, merge_by_step, read_records  # noqa: E402

Curve = list[tuple[float, float]]
"""(steps taken, value)."""

SAMPLED, GREEDY = "eval/held_out", "eval/held_out_greedy"
HEIGHT, WIDTH = 12, 64


def curve(records: Sequence[dict], name: str, step_key: str, shift: int = 0) -> Curve:
    """Return the values of one metric over steps; a repeated step has its last value."""
    steps = merge_by_step(records, step_key)
    return [(step + shift, metrics[name]) for step, metrics in steps.items() if name in metrics]


def eval_curve(records: Sequence[dict], name: str) -> Curve:
    """Return accuracy over *trained* steps: 0 for the evaluation before the first rollout, k + 1 after rollout k."""
    points: dict[float, float] = {}
    has_trained = False
    for record in records:
        has_trained = START_KEY not in record and (has_trained or "train/step" in record)
        if name in record:
            points[record["eval/step"] + 1 if has_trained else 0] = record[name]
    return sorted(points.items())


def draw(curves: dict[str, Curve]) -> str:
    """Draw a text chart with y from 0 to 1; the first letter of a curve's name marks its points."""
    last = max((point[0] for points in curves.values() for point in points), default=1) or 1
    grid = [[" "] * (WIDTH + 1) for _ in range(HEIGHT + 1)]
    for name, points in curves.items():
        for step, value in points:
            row = HEIGHT - round(min(max(value, 0.0), 1.0) * HEIGHT)
            grid[row][round(step / last * WIDTH)] = name[0]
    lines = [f"{1 - row / HEIGHT:5.2f} |{''.join(cells)}" for row, cells in enumerate(grid)]
    axis = f"      +{'-' * (WIDTH + 1)}\n       0{'steps':^{WIDTH - len(f'{last:g}')}}{last:g}"
    legend = "       " + ", ".join(f"{name[0]} = {name}" for name in curves)
    return "\n".join([*lines, axis, legend])


def write_png(curves: dict[str, Curve], path: Path) -> None:
    """Write the curves as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), dpi=120)
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), label=name, marker="" if len(points) > 20 else "o")
    axes.set(xlabel="GRPO steps", ylabel="share of right answers", ylim=(0, 1.02), title=path.parent.name)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _last_folder(parent: Path, pattern: str) -> Path | None:
    found = [folder for folder in parent.glob(pattern) if folder.is_dir()]
    return max(found, key=lambda folder: int("".join(filter(str.isdigit, folder.name)) or 0), default=None)


def summarise(run: Path) -> str:
    """Write ``curves.png`` into the run's folder and return the text of the summary."""
    records = list(read_records(run / FILE_NAME))
    curves = {
        "reward of the training prompts": curve(records, "rollout/raw_reward", "rollout/step"),
        "held-out, temperature 1": eval_curve(records, SAMPLED),
        "greedy, held-out": eval_curve(records, GREEDY),
    }
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        sys.exit(f"{run / FILE_NAME} holds neither rewards nor evaluations: did the run get to its first step?")
    write_png(curves, run / "curves.png")
    lines = [draw(curves), ""]
    for name in ("held-out, temperature 1", "greedy, held-out"):
        if name in curves:
            (_, first), (steps, last) = curves[name][0], curves[name][-1]
            lines.append(f"accuracy, {name + ':':<25} {first:.1%} -> {last:.1%} after {steps:g} steps")
    step_times = [value for _, value in curve(records, "perf/time_step_s", "rollout/step")]
    if step_times:
        lines.append(f"seconds a step: {sorted(step_times)[len(step_times) // 2]:.1f} (median of {len(step_times)})")
    lines.append(f"picture:        {run / 'curves.png'}")
    lines.append(f"all metrics:    {run / FILE_NAME}")
    lines.append(f"checkpoint:     {_last_folder(run, 'iter_*') or 'none'}")
    lines.append(f"HF model:       {_last_folder(run / 'hf', '*') or 'none'}")
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the --save folder of the run")
    options = parser.parse_args()
    if not (options.run / FILE_NAME).is_file():
        parser.error(f"{options.run} has no {FILE_NAME}; give the --save folder of a run")
    print(summarise(options.run))


if __name__ == "__main__":
    main()
