"""Make one page of a run, RUN/report.html: it opens from disk, loads nothing, and runs no script but its own.

    python tools/report.py RUN [--output FILE] [--samples-mb 5]

Summary, where the time goes, samples with coloured tokens, health with alarms, config.  Of many samples the page has
an even selection over the rollouts, and says so.
"""

from __future__ import annotations

import argparse
import base64
import bisect
import hashlib
import html
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.observability.accounting import CAUSES, ENGINE_SPANS, IDLE, TRAINER_SPANS, gpu_seconds
from slime.observability.alarms import find_alarms
from slime.observability.run_reader import Run, read_run
from slime.utils.processing_utils import load_tokenizer
from tools.cli import clean_exit

PAGE = Path(__file__).with_name("report_page")
MAX_POINTS, MAX_TIMELINES, MAX_EVENTS = 1000, 100, 500
SAME_MOMENT_S = 1e-3
"""Times of two spans that differ by less are one bound between steps."""
MAX_TEXT = 20_000
"""Characters of a prompt, and tokens of a response, that the page shows."""

_RANK = re.compile(r" [1-9]\d*$")
"""Ends the names of all ranks of a trainer but the first."""

SUMMARY_PLOTS = (("Reward", ("rollout/raw_reward",)),)
HEALTH_PLOTS = (
    ("Entropy", ("train/entropy_loss",)),
    ("KL", ("train/kl_loss", "train/ppo_kl")),
    ("Clipped tokens", ("train/pg_clipfrac",)),
    ("|trainer - engine| log-prob", ("train/train_rollout_logprob_abs_diff",)),
    ("Gradient norm", ("train/grad_norm",)),
    ("Response tokens", ("rollout/response_len/mean", "rollout/response_len/max")),
    ("Cut off, repeating", ("rollout/truncated_ratio", "rollout/repetition_frac")),
    ("Staleness", ("rollout/staleness/mean", "rollout/staleness/max")),
    ("Loss", ("train/loss", "train/pg_loss")),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="The folder of a run.")
    parser.add_argument("--output", type=Path, help="Default: report.html in that folder.")
    parser.add_argument("--samples-mb", type=float, default=5.0, help="Room for samples.")
    options = parser.parse_args(argv)
    with clean_exit():
        page = page_of(read_run(options.run), samples_mb=options.samples_mb)
    path = options.output or options.run / "report.html"
    path.write_text(page, encoding="utf-8")
    print(f"report:         {path} ({path.stat().st_size / 1e6:.1f} MB)")


def page_of(run: Run, *, samples_mb: float = 5.0, is_live: bool = False) -> str:
    """Return the page of a run as HTML."""
    parts = {name: (PAGE / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")}
    script = (PAGE / "uPlot.iife.min.js").read_text(encoding="utf-8") + "\n" + parts["page.js"]
    style = (PAGE / "uPlot.min.css").read_text(encoding="utf-8") + "\n" + parts["page.css"]
    data = json.dumps(data_of(run, samples_mb=samples_mb) | {"live": is_live}, allow_nan=False, separators=(",", ":"))
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'; "
    policy += f"script-src {_hash(script)}; style-src {_hash(style)}"
    filled = {"TITLE": html.escape(f"slime: {run.folder.name}"), "POLICY": policy, "STYLE": style, "SCRIPT": script}
    page = parts["page.html"]
    for name, text in filled.items():
        page = page.replace(f"@@{name}@@", text, 1)
    # No text of the run can end the element that holds it.
    head, tail = page.split("@@DATA@@")
    return head + data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029") + tail


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def data_of(run: Run, *, samples_mb: float) -> dict[str, Any]:
    """Return what the page shows, as JSON can hold it."""
    alarms = find_alarms(_steps_of(run))
    where = time_of(run)
    samples = samples_of(run, budget=int(samples_mb * 1e6))
    return {
        "name": run.folder.name,
        "state": run.state,
        "verdict": verdict_of(run, where, [alarm.text for alarm in alarms]),
        "facts": facts_of(run),
        "summary": plots_of(run, SUMMARY_PLOTS) + _evaluation_plots(run),
        "health": plots_of(run, HEALTH_PLOTS),
        "alarms": [{"name": one.name, "step": one.step + 1, "text": one.text} for one in alarms],
        "time": where,
        "samples": samples,
        "events": _events_of(run),
        "config": [
            [name, json.dumps(entry["value"], ensure_ascii=True), entry["origin"]]
            for name, entry in sorted(
                run.config.get("values", {}).items(), key=lambda one: one[1]["origin"] == "default"
            )
        ],
        "command": " ".join(run.config.get("command", [])),
    }


def _steps_of(run: Run) -> dict[int, dict[str, Any]]:
    """Return rollout -> its metrics and those of its last optimizer step."""
    per_rollout = max(1, round(len(run.steps) / max(1, len(run.rollouts)))) if run.steps else 1
    steps = {number: dict(metrics) for number, metrics in run.rollouts.items()}
    for number, metrics in run.steps.items():
        steps.setdefault(number // per_rollout, {}).update(metrics)
    return steps


# Words


def facts_of(run: Run) -> list[list[str]]:
    """Return pairs of a name and a text: what ran where."""
    config, hardware = run.config, run.config.get("hardware", {})
    gpus = hardware.get("gpus") or ["no GPU"]
    git = config.get("git", {})
    commit = (git.get("commit") or "unknown")[:12] + (" with changes" if git.get("changed") else "")
    begin = min((span.start for span in run.spans), default=None)
    end = max((span.end for span in run.spans), default=None)
    found = {
        "state": run.state,
        "model": str(run.value("hf_checkpoint", "unknown")),
        "estimator": str(run.value("advantage_estimator", "unknown")),
        "steps": f"{len(run.rollouts)} of {run.value('num_rollout', '?')}",
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begin)) if begin else "unknown",
        "took": f"{(end - begin) / 60:.1f} minutes" if begin is not None and end is not None else "unknown",
        "GPUs": ", ".join(f"{one.num_gpus} {one.name}" for one in run.gpu_classes) + f"; driver: {gpus[0]}",
        "host": f"{hardware.get('host', 'unknown')}, {hardware.get('cpus', '?')} cores",
        "commit": commit,
        "versions": ", ".join(f"{name} {value}" for name, value in config.get("versions", {}).items() if value),
    }
    return [[name, text] for name, text in found.items()]


def verdict_of(run: Run, where: dict[str, Any], alarms: Sequence[str]) -> list[str]:
    """Return the sentences that say how the run goes."""
    said = [_went("reward", [m.get("rollout/raw_reward") for m in run.rollouts.values()])]
    names = {name for metrics in run.evaluations.values() for name in _evaluation_names(metrics)}
    said += [_went(f"evaluation {n}", [m.get(f"eval/{n}") for m in run.evaluations.values()]) for n in sorted(names)]
    total = sum(where["total"].values())
    if total:
        shares = sorted(((v / total, k) for k, v in where["total"].items()), reverse=True)
        said.append("Most time: " + ", ".join(f"{cause} {share:.0%}" for share, cause in shares[:4]) + ".")
        lost = where["total"].get("longest answer", 0.0) / total
        if lost > 0.1:
            said.append(f"{lost:.0%} of the GPUs' time is spent waiting for the longest 3 % of the answers.")
        if (idle := where["total"].get(IDLE, 0.0) / total) > 0.2:
            said.append(f"GPUs are idle for {idle:.0%} of the time.")
    errors = [one["text"] for one in run.events if one["event"] == "error"]
    deaths = [one for one in run.events if one["event"] == "engine" and one.get("state") == "evicted"]
    said += [f"It failed: {errors[-1]}"] if errors and run.state == "failed" else []
    said += [f"{len(deaths)} engines were evicted; the first: {deaths[0].get('why')}."] if deaths else []
    said.append(f"{len(alarms)} alarms: {'; '.join(alarms)}." if alarms else "No alarm.")
    return [sentence for sentence in said if sentence]


def _went(what: str, values: Sequence[Any]) -> str:
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(numbers) < 2:
        return f"{what.capitalize()}: {numbers[0]:.3g}." if numbers else ""
    change = numbers[-1] - numbers[0]
    verb = "rose" if change > 0.01 * abs(numbers[0]) else "fell" if -change > 0.01 * abs(numbers[0]) else "stayed"
    return f"{what.capitalize()} {verb} from {numbers[0]:.3g} to {numbers[-1]:.3g} (best {max(numbers):.3g})."


def _evaluation_names(metrics: dict[str, Any]) -> list[str]:
    names = [name.removeprefix("eval/") for name in metrics if name.startswith("eval/") and name != "eval/step"]
    return [
        name for name in names if "/" not in name and not name.endswith("-truncated_ratio") and "-pass@" not in name
    ]


def _events_of(run: Run) -> list[list[str]]:
    shown = [one for one in run.events if one["event"] not in ("recorded", "push")]
    return [
        [
            time.strftime("%H:%M:%S", time.localtime(one.get("time", 0))),
            str(one.get("process")),
            str(one["event"]),
            "; ".join(f"{k} {v}" for k, v in one.items() if k not in ("time", "process", "event"))[:1000],
        ]
        for one in shown[-MAX_EVENTS:]
    ]


# Curves


def plots_of(run: Run, plots: Sequence[tuple[str, Sequence[str]]]) -> list[dict[str, Any]]:
    """Return the plots of which there are numbers: title, x (steps from 1) and series."""
    steps, found = _steps_of(run), []
    for title, names in plots:
        found.append(_plot(title, steps, {name: name for name in names}))
    return [plot for plot in found if plot["series"]]


def _evaluation_plots(run: Run) -> list[dict[str, Any]]:
    names = sorted({name for metrics in run.evaluations.values() for name in _evaluation_names(metrics)})
    plot = _plot("Evaluation", run.evaluations, {f"eval/{name}": name for name in names})
    return [plot] if plot["series"] else []


def _plot(title: str, steps: dict[int, dict[str, Any]], labels: dict[str, str]) -> dict[str, Any]:
    numbers = sorted(steps)
    kept = numbers[:: max(1, math.ceil(len(numbers) / MAX_POINTS))]
    columns = {label: [_number(steps[step].get(name)) for step in kept] for name, label in labels.items()}
    series = [{"label": label, "y": y} for label, y in columns.items() if any(value is not None for value in y)]
    return {"title": title, "x": [step + 1 for step in kept], "series": series}


def _number(value: Any) -> float | None:
    return float(f"{value:.6g}") if isinstance(value, int | float) and math.isfinite(value) else None


# Time


def time_of(run: Run) -> dict[str, Any]:
    """Return GPU-seconds by cause, in all and by step, and the spans of the last steps."""
    first_ranks = [span for span in run.spans if not _RANK.search(span.process)]
    steps = sorted((span for span in first_ranks if span.name == "step"), key=lambda span: span.start)
    if not first_ranks:
        return {"total": {}, "steps": [], "timelines": [], "causes": list(CAUSES)}
    begin, end = min(span.start for span in first_ranks), max(span.end for span in first_ranks)
    bounds = [begin]
    for moment in sorted([*(span.start for span in steps), *(span.end for span in steps), end]):
        if moment > bounds[-1] + SAME_MOMENT_S:
            bounds.append(moment)
    intervals = gpu_seconds(first_ranks, run.gpu_classes, bounds)
    total: dict[str, float] = {}
    for interval in intervals:
        for cause, value in interval.items():
            total[cause] = total.get(cause, 0.0) + value
    rows = [
        {
            "step": (step.rollout or 0) + 1,
            "s": {
                k: round(v, 3)
                for k, v in intervals[bisect.bisect_right(bounds, step.start + SAME_MOMENT_S) - 1].items()
            },
        }
        for step in steps
        if step.end > step.start + SAME_MOMENT_S
    ]
    timelines = [
        {
            "step": (step.rollout or 0) + 1,
            "seconds": round(step.end - step.start, 3),
            "spans": [
                [span.process, span.name, round(span.start - step.start, 3), round(span.end - span.start, 3)]
                for span in first_ranks
                if span.end > step.start and span.start < step.end and span.name not in ("step", "train_wait")
            ],
        }
        for step in steps[-MAX_TIMELINES:]
    ]
    return {
        "total": {cause: round(total[cause], 3) for cause in CAUSES if cause in total},
        "steps": rows[:: max(1, math.ceil(len(rows) / MAX_POINTS))],
        "timelines": timelines,
        "causes": list(CAUSES),
        "cause_of": ENGINE_SPANS | TRAINER_SPANS,
        "gpus": sum(one.num_gpus for one in run.gpu_classes),
        "wall": round(end - begin, 3),
    }


# Samples


def samples_of(run: Run, *, budget: int) -> dict[str, Any]:
    """Return an even selection of the samples over the rollouts, of at most ``budget`` bytes, whole groups first."""
    files = run.sample_files()
    pieces = _Pieces(str(run.value("hf_checkpoint", "")), trust=bool(run.value("trust_remote_code", False)))
    files = files[:: max(1, math.ceil(len(files) / 200))]
    rows: list[dict[str, Any]] = []
    prompts: dict[str, int] = {}
    num_all = used = 0
    for path in files:
        share, spent = (budget - used) // max(1, len(files) - len([1 for one in files if one < path])), 0
        for row in run.samples(int(path.stem.split("_")[1])):
            num_all += 1
            if spent > share:
                continue
            shown = _sample(row, pieces)
            text = row["prompt"][:MAX_TEXT]
            if text not in prompts:
                prompts[text] = len(prompts)
                spent += len(text)
            shown["p"] = prompts[text]
            rows.append(shown)
            spent += len(json.dumps(shown))
        used += spent
    return {"rows": rows, "prompts": list(prompts), "all": num_all, "has_pieces": pieces.has_tokenizer}


def _sample(row: dict[str, Any], pieces: _Pieces) -> dict[str, Any]:
    length = row["response_length"] or 0
    ids = row["tokens"][len(row["tokens"]) - length :][:MAX_TEXT] if length else []
    engine, trainer = row.get("engine_log_probs"), row.get("trainer_log_probs")
    difference = [t - e for t, e in zip(trainer, engine)] if trainer and engine else None
    versions = list(zip(row["weight_versions"] or [], row["call_tokens"] or []))
    return {
        "r": row["rollout"] + 1,
        "g": row["group"],
        "i": row["index"],
        "s": row["status"],
        "drop": row["drop_reason"],
        "rw": _number(row["reward"]),
        "tr": _number(row["train_reward"]),
        "n": length,
        "l": row["label"],
        "t": pieces.of(ids),
        "x": None if pieces.has_tokenizer else (row["response"] or "")[:MAX_TEXT],
        "lp": _rounded(engine),
        "d": _rounded(difference, 5),
        "a": _rounded(row.get("advantages")),
        "m": row["loss_mask"] if row["loss_mask"] and not all(row["loss_mask"]) else None,
        "v": versions,
    }


def _rounded(values: Sequence[float] | None, digits: int = 3) -> list[float | None] | float | None:
    """Return numbers of few digits; one for all when they are equal."""
    if not values:
        return None
    short = [round(value, digits) if math.isfinite(value) else None for value in values[:MAX_TEXT]]
    return short[0] if len(set(short)) == 1 else short


class _Pieces:
    """Texts of tokens, by the run's tokenizer where it can be read."""

    def __init__(self, path: str, *, trust: bool) -> None:
        self._known: dict[int, str] = {}
        self._tokenizer: Any = None
        if path and Path(path).is_dir() and not trust:  # a page of somebody's run runs no code of theirs
            try:
                self._tokenizer = load_tokenizer(path)
            except Exception as error:  # the edge of another library: the page does without
                print(f"{path}: no tokenizer ({type(error).__name__}: {error}); tokens are shown as numbers")

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def of(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        for one in set(ids) - self._known.keys():
            self._known[one] = self._tokenizer.decode([one]) if self._tokenizer is not None else f"{one} "
        return [self._known[one] for one in ids]


if __name__ == "__main__":
    main()
