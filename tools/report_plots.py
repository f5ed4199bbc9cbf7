"""The plots of a run's report: which there are, what each tells, and their numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from slime.ext.record.alarms import EXPERT_LAYER
from slime.ext.record.run_reader import Run
from slime.observability.metrics_file import evaluations
from tools.report_samples import DIFFERENCES, Rollout

MAX_POINTS, MAX_HEAT_STEPS, MAX_METRIC_POINTS = 1000, 250, 250
AXES = {"time", "rollout/step", "train/step", "eval/step"}


@dataclass(frozen=True, slots=True)
class Plot:
    """Curves that one looks at together."""

    title: str
    about: str
    """What it tells, in a sentence."""
    names: Mapping[str, str]
    """Label -> metric."""
    band: tuple[str, str] | None = None
    """The metrics around the first curve."""
    alarms: tuple[str, ...] = ()
    """Those that are drawn into it."""


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


REWARD = Plot(
    "Reward",
    "Mean of a rollout; the band has the middle 80 % of the prompts.",
    {"mean": "rollout/raw_reward", "median prompt": "samples/reward/middle"},
    ("samples/reward/low", "samples/reward/high"),
    ("collapse", "all-zero rewards"),
)
HEALTH_PLOTS = (
    REWARD,
    Plot(
        "Groups", "Groups of equal rewards train nothing; the spread is the deviation within the others.",
        {"equal rewards": "samples/equal_groups", "spread": "samples/group_spread"}, alarms=("equal groups",),
    ),
    Plot(
        "Response tokens", "The band has the middle 80 % of the responses.",
        {
            "median": "samples/length/middle", "longest": "samples/length/max",
            "mean, unmasked": "rollout/response_len/mean",
        },
        ("samples/length/low", "samples/length/high"), ("length explosion", "length pays"),
    ),
    Plot(
        "Cut off, repeating, duplicate",
        "Shares of the responses: at the limit of tokens; that repeat themselves; that another answer to the prompt "
        "repeats.",
        {
            "cut off": "rollout/truncated_ratio", "repeating": "rollout/repetition_frac",
            "duplicates": "samples/duplicates",
        },
        alarms=("length explosion", "duplicates"),
    ),
    Plot(
        "Reward and length", "Correlation within groups: near 1, longer answers get more reward.",
        {"correlation": "samples/length_pays"}, alarms=("length pays",),
    ),
    Plot("Entropy", "Of the trained tokens, nats; near 0 nothing new is tried.", _same("train/entropy_loss"),
         alarms=("entropy collapse",)),
    Plot("KL", "From the reference, and from the policy before the step.", _same("train/kl_loss", "train/ppo_kl")),
    Plot("Clipped tokens", "Share of the tokens whose ratio was clipped.", _same("train/pg_clipfrac")),
    Plot(
        "|trainer - engine| log-prob", "Nats a token; large or growing: the engine draws from something else than is "
        "trained.",
        {
            "mean": "train/train_rollout_logprob_abs_diff", "median": "samples/difference/middle",
            "99 %": "samples/difference/high",
        },
        alarms=("mismatch",),
    ),
    Plot(
        "Importance ratio",
        "Trainer's over the engine's probability of a token; 1 is on-policy. The band has 98 % of the tokens.",
        {"median": "samples/ratio/middle", "largest": "samples/ratio/max", "smallest": "samples/ratio/min"},
        ("samples/ratio/low", "samples/ratio/high"), ("mismatch",),
    ),
    Plot("Ratio outside of the clip range", "Share of the tokens.", {"outside": "samples/outside_clip"},
         alarms=("mismatch",)),
    Plot("Gradient norm", "Before it is clipped.", _same("train/grad_norm"),
         alarms=("large gradients", "broken numbers")),
    Plot(
        "Staleness", "Versions between a sample's oldest token and the trainer (or the newest token of its rollout); "
        "pushes that are late.",
        {
            "mean": "rollout/staleness/mean", "largest": "rollout/staleness/max",
            "largest in the rollout": "samples/lag/max", "late pushes": "samples/late_pushes",
        },
        alarms=("late pushes",),
    ),
    Plot(
        "Experts",
        "Of the worst layer: tokens of the fullest expert over the mean; share of the experts without a token.",
        {"fullest / mean": "train/expert_load/worst_max_over_mean", "idle share": "train/expert_load/worst_idle"},
        alarms=("dead experts",),
    ),
    Plot("Loss", "", _same("train/loss", "train/pg_loss"), alarms=("broken numbers",)),
)  # fmt: skip


def plots_of(steps: Mapping[int, Mapping[str, Any]], plots: Sequence[Plot]) -> list[dict[str, Any]]:
    """Return the plots of which there are numbers: title, x (steps from 1), series, and the bounds of the band."""
    numbers = sorted(steps)
    kept = numbers[:: max(1, math.ceil(len(numbers) / MAX_POINTS))]

    def column(name: str) -> list[float | None]:
        return [_number(steps[step].get(name)) for step in kept]

    found = []
    for plot in plots:
        columns = {label: column(name) for label, name in plot.names.items()}
        series = [{"label": k, "y": y} for k, y in columns.items() if any(value is not None for value in y)]
        band = [column(name) for name in plot.band or ()]
        has_band = bool(band) and any(value is not None for value in band[0])
        shown = {"title": plot.title, "about": plot.about, "x": [step + 1 for step in kept], "series": series}
        found.append(shown | {"band": band if has_band else None, "alarms": plot.alarms})
    return [plot for plot in found if plot["series"]]


def metric_plots(runs: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return a plot of each metric: a curve for each run that has it, by the run's name."""
    numbers = sorted({step for steps in runs.values() for step in steps})
    kept = numbers[:: max(1, math.ceil(len(numbers) / MAX_METRIC_POINTS))]
    found: dict[str, list[dict[str, Any]]] = {}
    for run, steps in runs.items():
        for name in sorted({name for metrics in steps.values() for name in metrics} - AXES):
            column = [_number(steps.get(step, {}).get(name)) for step in kept]
            if any(value is not None for value in column):
                found.setdefault(name, []).append({"label": run, "y": column})
    x = [step + 1 for step in kept]
    return [{"title": name, "x": x, "series": series} for name, series in sorted(found.items())]


def evaluation_plots(run: Run) -> list[dict[str, Any]]:
    """Return a plot of each evaluation, with the mean's standard error over prompts, doubled, around it."""
    found = []
    for name in sorted({name for metrics in run.evaluations.values() for name in evaluations(metrics)}):
        steps = {step: dict(metrics) for step, metrics in run.evaluations.items()}
        for metrics in steps.values():
            mean, error = metrics.get(f"eval/{name}"), metrics.get(f"eval/{name}/stderr")
            if isinstance(mean, int | float) and isinstance(error, int | float):
                metrics |= {"low": mean - 2 * error, "high": mean + 2 * error}
        about = "Mean of the data set; the band is two standard errors over its prompts."
        found += plots_of(steps, [Plot(f"Evaluation: {name}", about, {name: f"eval/{name}"}, ("low", "high"))])
    return found


def heats(steps: Mapping[int, Mapping[str, Any]], rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    """Return histograms over the steps: title, x, names of the rows, and a value from 0 to 1 of each row and step."""
    found = []
    if with_differences := [one for one in rollouts if one.differences]:
        kept = with_differences[:: math.ceil(len(with_differences) / MAX_HEAT_STEPS)]
        found.append({
            "title": "|trainer - engine| log-prob, share of the tokens", "x": [one.number + 1 for one in kept],
            "rows": [*(f"{low:g} to {high:g}" for low, high in pairwise(DIFFERENCES)), "1 and more"],
            "z": [one.differences for one in kept],
        })  # fmt: skip
    layers = sorted({int(m[1]) for one in steps.values() for name in one if (m := EXPERT_LAYER.fullmatch(name))})
    for what, title in (("idle", "Experts without a token, share"), ("max_over_mean", "Fullest expert / mean / 10")):
        names = [f"train/expert_load/layer_{layer}/{what}" for layer in layers]
        kept = [step for step in sorted(steps) if any(name in steps[step] for name in names)]
        kept = kept[:: max(1, math.ceil(len(kept) / MAX_HEAT_STEPS))]
        scale = 1 if what == "idle" else 10
        z = [[round(min(1.0, (_number(steps[step].get(name)) or 0.0) / scale), 3) for name in names] for step in kept]
        if z:
            rows = [f"layer {layer}" for layer in layers]
            found.append({"title": title, "x": [step + 1 for step in kept], "rows": rows, "z": z})
    return found


def dropped_plots(rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    """Return a plot of the samples that were dropped, by reason; the most frequent ones."""
    total: Counter[str] = Counter()
    for one in rollouts:
        total.update(one.dropped)
    steps = {one.number: {reason: one.dropped.get(reason, 0) for reason in total} for one in rollouts}
    names = {reason[:60]: reason for reason, _ in total.most_common(4)}
    return plots_of(steps, [Plot("Dropped samples", "By reason.", names)] if names else [])


def _number(value: Any) -> float | None:
    return float(f"{value:.6g}") if isinstance(value, int | float) and math.isfinite(value) else None
