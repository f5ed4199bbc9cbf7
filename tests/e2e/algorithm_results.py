"""What the jobs of ``tests.e2e.algorithms`` did: numbers from their ``metrics.jsonl``, the table, the picture."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from examples.tiny_arithmetic.summary import GREEDY, SAMPLED, Curve, curve, eval_curve
from slime.observability.metrics_file import FILE_NAME, read_records

LOWER_TARGET = 0.90
"""What the tiny task was made for; the column stands beside the one of ``--target``."""
MISMATCH_METRICS = ("tis", "tis_abs", "tis_clipfrac", "ois")


@dataclass
class RunResult:
    """One job."""

    variant: str
    title: str
    seed: int
    flags: list[str]
    why: str
    seconds: float
    """Of the job from start to end, all its starts together."""
    starts: int
    failure: str | None
    """None for a job that did all of its rollouts."""
    sampled: Curve = field(default_factory=list)
    """(rollouts trained, held-out accuracy at temperature 1)."""
    greedy: Curve = field(default_factory=list)
    reward: Curve = field(default_factory=list)
    """(rollouts trained before it, mean reward of a rollout's samples)."""
    log_prob_difference: Curve = field(default_factory=list)
    """(optimizer step, mean abs(log-prob of the trainer - log-prob of the engine) over the tokens)."""
    clip_fraction: Curve = field(default_factory=list)
    mismatch: dict[str, float] = field(default_factory=dict)
    """Mean over the steps of each metric of the correction, where there is one."""
    step_s: float | None = None
    """Median."""

    def rollouts_to(self, target: float) -> int | None:
        """Rollouts trained at the first evaluation (temperature 1) that is at least ``target``."""
        return next((int(step) for step, value in self.sampled if value >= target), None)


def read_run(folder: Path, **about: Any) -> RunResult:
    """The numbers of the run in ``folder``; ``about`` are the fields that its metrics do not say."""
    path = folder / FILE_NAME
    records = list(read_records(path)) if path.exists() else []
    mismatch = {name: [value for _, value in _steps(records, name)] for name in MISMATCH_METRICS}
    seconds = [value for _, value in curve(records, "perf/time_step_s", "rollout/step")]
    return RunResult(
        **about,
        sampled=eval_curve(records, SAMPLED),
        greedy=eval_curve(records, GREEDY),
        reward=curve(records, "rollout/raw_reward", "rollout/step"),
        log_prob_difference=_steps(records, "train_rollout_logprob_abs_diff"),
        clip_fraction=_steps(records, "pg_clipfrac"),
        mismatch={name: statistics.fmean(values) for name, values in mismatch.items() if values},
        step_s=statistics.median(seconds) if seconds else None,
    )


def _steps(records: Sequence[dict], name: str) -> Curve:
    return curve(records, f"train/{name}", "train/step")


def save(path: Path, about: dict[str, Any], runs: Sequence[RunResult]) -> None:
    """Everything that the table and the picture are made of, as JSON."""
    path.write_text(json.dumps({"about": about, "runs": [asdict(run) for run in runs]}, indent=1) + "\n")


def load(path: Path) -> tuple[dict[str, Any], list[RunResult]]:
    """What :func:`save` wrote."""
    content = json.loads(path.read_text())
    return content["about"], [RunResult(**run) for run in content["runs"]]


def misses(runs: Sequence[RunResult], target: float) -> list[str]:
    """A line for each run that failed or did not reach ``target``; empty when all is well."""
    lines = []
    for run in runs:
        name = f"{run.variant}, seed {run.seed}"
        if run.failure is not None:
            lines.append(f"{name}: {run.failure}")
        elif run.rollouts_to(target) is None:
            best = max((value for _, value in run.sampled), default=0.0)
            lines.append(f"{name}: {best:.3f} at best, the target is {target:.3f}")
    return lines


def by_variant(runs: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """Variant -> its runs, in the order of the runs."""
    groups: dict[str, list[RunResult]] = {}
    for run in runs:
        groups.setdefault(run.variant, []).append(run)
    return groups


# The table


def table(about: dict[str, Any], runs: Sequence[RunResult]) -> str:
    """Markdown: the table, and below it what each row sets and why."""
    target = about["target"]
    before = [value for run in runs for step, value in run.sampled if step == 0]
    head = (
        f"{about['rollouts']} rollouts of 256 samples on {about['machine']}, from one warm start "
        f"({statistics.fmean(before):.3f} right at temperature 1 before the first rollout); 512 held-out prompts, "
        "evaluated after every fifth rollout. Several seeds: mean, lowest to highest in parentheses."
        if before
        else f"{about['rollouts']} rollouts of 256 samples on {about['machine']}, from one warm start."
    )
    columns = (
        *("algorithm", "seeds", "accuracy at temperature 1, before and after", "greedy, before and after"),
        *(f"rollouts to {LOWER_TARGET:.2f}", f"rollouts to {target:.2f}", "seconds", "largest abs(dlogp)"),
    )
    lines = [head, "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for group in by_variant(runs).values():
        lines.append("| " + " | ".join(_row(group, target)) + " |")
    lines += [
        "",
        "Seconds: of the whole job, the start of Ray, engine and trainer among them. abs(dlogp): mean over the tokens "
        "of a step of the difference between the log-probs of trainer and engine; in the asynchronous rows the engine "
        "is an update behind, which is what TIS corrects.",
        "",
        *_settings(runs),
    ]
    problems = misses(runs, target)
    return "\n".join([*lines, *(["", "Not reached:", *(f"* {problem}" for problem in problems)] if problems else [])])


def _row(group: Sequence[RunResult], target: float) -> list[str]:
    good = [run for run in group if run.sampled]
    return [
        group[0].title,
        ", ".join(str(run.seed) for run in group),
        _before_after([run.sampled for run in good]),
        _before_after([run.greedy for run in good]),
        _spread([run.rollouts_to(LOWER_TARGET) for run in good], "{:.3g}".format),
        _spread([run.rollouts_to(target) for run in good], "{:.3g}".format),
        _spread([run.seconds for run in group], "{:.0f}".format),
        _spread([max((value for _, value in run.log_prob_difference), default=None) for run in good], "{:.1g}".format),
    ]


def _before_after(curves: Sequence[Curve]) -> str:
    before = [dict(map(tuple, points)).get(0) for points in curves]
    after = [points[-1][1] if points else None for points in curves]
    return f"{_spread(before, '{:.3f}'.format)}, {_spread(after, '{:.3f}'.format)}"


def _spread(values: Sequence[float | None], form: Callable[[float], str]) -> str:
    """The mean, and the range of several; a dash for what there is not; how many of several there are not."""
    there = [value for value in values if value is not None]
    if not there:
        return "-"
    text = form(statistics.fmean(there))
    if form(min(there)) != form(max(there)):
        text += f" ({form(min(there))} to {form(max(there))})"
    return text if len(there) == len(values) else f"{text}, {len(values) - len(there)} never"


def _settings(runs: Sequence[RunResult]) -> list[str]:
    lines = ["## Flags", "", "| algorithm | flags beside those of `scripts/run-tiny-cpu.sh` | why |", "|---|---|---|"]
    for group in by_variant(runs).values():
        run = group[0]
        lines.append(f"| {run.title} | `{' '.join(run.flags)}` | {run.why}{_measured(group)} |")
    return lines


def _measured(group: Sequence[RunResult]) -> str:
    """What the clip and the correction did, as measured."""
    parts = []
    clipped = [value for run in group for _, value in run.clip_fraction]
    if any(clipped):
        parts.append(f"clipped: {statistics.fmean(clipped):.1%} of the tokens")
    weights = [run.mismatch for run in group if "tis_abs" in run.mismatch]
    if weights:
        mean = {name: statistics.fmean(one[name] for one in weights) for name in weights[0]}
        parts.append(f"mean abs(weight - 1) {mean['tis_abs']:.3f}, {mean['tis_clipfrac']:.1%} of the weights cut")
    return f" ({'; '.join(parts)})" if parts else ""


# The picture


def draw(path: Path, about: dict[str, Any], runs: Sequence[RunResult]) -> None:
    """PNG: held-out accuracy and training reward over the rollouts, mean and range over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = [("held-out accuracy, temperature 1", "sampled"), ("reward of the training samples", "reward")]
    kinds = [(title, name) for title, name in kinds if any(getattr(run, name) for run in runs)]
    figure, panels = pyplot.subplots(
        1, len(kinds), figsize=(6.5 * len(kinds), 5.5), dpi=100, sharey=True, squeeze=False
    )
    panels = panels[0]
    colours = pyplot.get_cmap("tab20").colors
    for axes, (title, name) in zip(panels, kinds, strict=True):
        for number, group in enumerate(by_variant(runs).values()):
            steps, mean, low, high = _band([getattr(run, name) for run in group])
            label = group[0].title + (f", {len(group)} seeds" if len(group) > 1 else "")
            colour = colours[(2 * number + number // 10) % len(colours)]
            axes.plot(steps, mean, label=label, color=colour, marker="o" if name == "sampled" else "", markersize=3)
            if len(group) > 1:
                axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.axhline(about["target"], color="grey", linewidth=0.8, linestyle="--")
        axes.set(xlabel="rollouts", title=title, ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("share of right answers")
    panels[-1].legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _band(curves: Sequence[Curve]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Steps that every curve has, and their mean, lowest and highest value."""
    tables = [dict(map(tuple, points)) for points in curves if points]
    steps = sorted(set.intersection(*(set(values) for values in tables))) if tables else []
    columns = [[values[step] for values in tables] for step in steps]
    return steps, [statistics.fmean(column) for column in columns], [*map(min, columns)], [*map(max, columns)]
