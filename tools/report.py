"""Make one page of a run, RUN/report.html: it opens from disk, loads nothing, and runs no script but its own.

    slime report RUN [--beside RUN ...] [--output FILE] [--samples-mb 5]
    slime report RUN --text        the summary alone, on the terminal

Summary, every metric (of several runs beside each other), where the time goes, samples with coloured tokens, health
with alarms, config.  Of many samples the page has an even selection over the rollouts, and says so.
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
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.algorithms.advantages import ESTIMATORS
from slime.ext.record.accounting import CAUSES, ENGINE_SPANS, IDLE, TRAINER_SPANS, Span, gpu_seconds
from slime.ext.record.alarms import find_alarms
from slime.ext.record.run_reader import Run, read_run
from slime.flags.kinds import non_negative_float
from slime.observability.metrics_file import evaluations
from slime.utils.errors import ConfigError
from tools.cli import clean_exit
from tools.report_plots import (
    HEALTH_PLOTS,
    MAX_POINTS,
    REWARD,
    Plot,
    dropped_plots,
    evaluation_plots,
    heats,
    metric_plots,
    plots_of,
)
from tools.report_samples import Rollout, prompt_rewards, read_evaluations, read_rollouts
from tools.report_texts import Pieces, samples_of
from tools.terminal import say

PAGE = Path(__file__).with_name("report_page")
SCRIPTS, STYLES = ("uPlot.iife.min.js", "parts.js", "samples.js", "page.js"), ("uPlot.min.css", "page.css")
MAX_TIMELINES, MAX_SPANS, MAX_EVENTS = 1000, 25_000, 500
RECENT = 10
"""Rollouts at the end of a run over which its verdict takes means."""
SAME_MOMENT_S = 1e-3
"""Times of two spans that differ by less are one bound between steps."""
_RANK = re.compile(r" [1-9]\d*$")
"""Ends the names of all ranks of a trainer but the first."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="The folder of a run.")
    parser.add_argument("--output", type=Path, help="Default: report.html in that folder.")
    parser.add_argument("--samples-mb", type=non_negative_float, default=5.0, help="Room for samples.")
    parser.add_argument("--beside", type=Path, nargs="+", default=[], metavar="RUN", help="Runs to compare with.")
    parser.add_argument("--text", action="store_true", help="Print the summary, and write no page.")
    options = parser.parse_args(argv)
    with clean_exit():
        if options.text:
            return say(*lines_of(read_run(options.run)))
        beside = [read_run(folder, with_spans=False) for folder in options.beside]
        page = page_of(read_run(options.run), beside, samples_mb=options.samples_mb)
        path = options.output or options.run / "report.html"
        write_page(path, page, flag="--output")
    say(f"report:         {path} ({path.stat().st_size / 1e6:.1f} MB)")


def lines_of(run: Run) -> list[str]:
    """Return the summary of a run: what ran, alarms, how it went, where the time went."""
    rollouts = read_rollouts(run)
    steps = _steps_with_samples(run, rollouts, Pieces(run))
    alarms = [f"From step {one.step + 1}, {one.name}: {one.text}." for one in find_alarms(steps)]
    facts = [f"{name + ':':<11}{text}" for name, text in facts_of(run)]
    verdict = verdict_of(run, time_of(run, rollouts), steps, [*rollouts, *read_evaluations(run)])
    return [*facts, "", *(alarms or ["No alarm."]), *verdict]


def write_page(path: Path, page: str, *, flag: str) -> None:
    """Write a page.

    Raises:
        ConfigError: it cannot be written; the message names ``flag``.
    """
    try:
        path.write_bytes(encoded(page))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); name another file with {flag}.") from error


def encoded(page: str) -> bytes:
    """Return a page as bytes; what is no letter, of a folder's name that is no UTF-8, becomes an escape."""
    return page.encode(errors="backslashreplace")


def page_of(run: Run, beside: Sequence[Run] = (), *, samples_mb: float = 5.0, is_live: bool = False) -> str:
    """Return the page of a run as HTML; the metrics of the runs ``beside`` stand in the same plots."""
    found = data_of(run, beside, samples_mb=samples_mb) | {"live": is_live}
    data = json.dumps(found, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # no text of the run can end the element that holds it
    policy = "img-src data:; " + ("connect-src 'self'; " if is_live else "")
    title = html.escape(f"slime: {run.folder.name}")
    return fill_page("page.html", SCRIPTS, STYLES, policy=policy, TITLE=title, DATA=data)


def fill_page(name: str, scripts: Sequence[str], styles: Sequence[str], *, policy: str = "", **texts: str) -> str:
    """Return a page of ``report_page/`` that runs these scripts and no others; ``policy`` is what else it may do."""
    page, script, style = (
        "\n".join((PAGE / one).read_text(encoding="utf-8") for one in names) for names in ([name], scripts, styles)
    )
    policy += "default-src 'none'; base-uri 'none'; form-action 'none'; "
    policy += f"script-src {source_hash(script)}; style-src {source_hash(style)}"
    texts |= {"POLICY": policy, "STYLE": style, "SCRIPT": script}
    return re.sub("@@([A-Z]+)@@", lambda place: texts[place[1]], page)  # at once: no text is a template


def source_hash(text: str) -> str:
    """Return the source by which a Content-Security-Policy allows a script or a style sheet."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def data_of(run: Run, beside: Sequence[Run] = (), *, samples_mb: float) -> dict[str, Any]:
    """Return what the page shows, as JSON can hold it."""
    rollouts, pieces = read_rollouts(run), Pieces(run)
    steps = _steps_with_samples(run, rollouts, pieces)
    alarms = find_alarms(steps)
    where = time_of(run, rollouts)
    in_order = sorted([*rollouts, *read_evaluations(run)], key=lambda one: (one.number, one.evaluation or ""))
    return {
        "name": run.folder.name,
        "state": run.state,
        "verdict": verdict_of(run, where, steps, in_order),
        "facts": facts_of(run),
        "metrics": metric_plots({str(run.folder): steps} | {str(one.folder): _steps_of(one) for one in beside}),
        "summary": plots_of(steps, [REWARD]) + evaluation_plots(run),
        "health": plots_of(steps, HEALTH_PLOTS),
        "heat": heats(steps, rollouts),
        "alarms": [{"name": one.name, "step": one.step + 1, "text": one.text} for one in alarms],
        "time": where,
        "samples": samples_of(in_order, pieces, budget=int(samples_mb * 1e6)),
        "dropped": dropped_plots(rollouts),
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
    steps = {number: dict(metrics) for number, metrics in run.rollouts.items()}
    for number, metrics in run.steps.items():
        steps.setdefault(number // run.steps_per_rollout, {}).update(metrics)
    return steps


def _steps_with_samples(run: Run, rollouts: Sequence[Rollout], pieces: Pieces) -> dict[int, dict[str, Any]]:
    """Return ``_steps_of`` a run, and what its samples tell of each rollout."""
    steps = _steps_of(run)
    for one in rollouts:
        steps.setdefault(one.number, {}).update(one.figures)
    if rollouts and (marks := pieces.foreign_markers(run)):
        steps[rollouts[0].number]["samples/foreign_markers"] = ", ".join(marks)
    return steps


# Words


def facts_of(run: Run) -> list[list[str]]:
    """Return pairs of a name and a text: what ran where."""
    config, hardware = run.config, run.config.get("hardware", {})
    gpus = hardware.get("gpus") or ["no GPU"]
    classes = ", ".join(f"{one.num_gpus} {one.name}" for one in run.gpu_classes)
    git = config.get("git", {})
    commit = (git.get("commit") or "unknown")[:12] + (" with changes" if git.get("changed") else "")
    spans = _own_spans(run)
    begin = min((span.start for span in spans), default=None)
    end = max((span.end for span in spans), default=None)
    found = {
        "state": run.state,
        "model": str(run.value("hf_checkpoint", "unknown")),
        "estimator": str(run.value("advantage_estimator", "unknown")),
        "steps": f"{len(run.rollouts)} of {'?' if run.num_rollout is None else run.num_rollout}",
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begin)) if begin else "unknown",
        "took": f"{(end - begin) / 60:.1f} minutes" if begin is not None and end is not None else "unknown",
        "GPUs": f"{classes}; driver: {gpus[0]}" if run.has_gpus else f"none; logical ones: {classes}",
        "host": f"{hardware.get('host', 'unknown')}, {hardware.get('cpus', '?')} cores",
        "commit": commit,
        "versions": ", ".join(f"{name} {value}" for name, value in config.get("versions", {}).items() if value),
    }
    return [[name, text] for name, text in found.items()]


def verdict_of(
    run: Run, where: dict[str, Any], steps: Mapping[int, Mapping[str, Any]], answers: Sequence[Rollout]
) -> list[str]:
    """Return the sentences that say how the run goes; alarms stand beside them."""
    in_order = [metrics for _, metrics in sorted(steps.items())]
    has_rewards = any(one.get("rollout/raw_reward") or "train/pg_loss" in one for one in in_order)
    has_loss = any("train/loss" in one for one in in_order)
    what, name = ("loss", "train/loss") if has_loss and not has_rewards else ("reward", "rollout/raw_reward")
    of_reward = [] if what == "loss" else [one for one in answers if one.evaluation is None]
    said = [_went(what, [one.get(name) for one in in_order], of_reward)]
    for n in sorted({name for metrics in run.evaluations.values() for name in evaluations(metrics)}):
        values = [metrics.get(f"eval/{n}") for metrics in run.evaluations.values()]
        said.append(_went(f"evaluation {n}", values, [one for one in answers if one.evaluation == n]))
    equal = [one["samples/equal_groups"] for one in in_order[-RECENT:] if "samples/equal_groups" in one]
    estimator = ESTIMATORS.get(str(run.value("advantage_estimator", "grpo")))
    compares = estimator is not None and estimator.group_baseline is not None and not run.value("use_opd", False)
    if compares and equal and (share := sum(equal) / len(equal)) > 0.5:
        said.append(
            f"In {share:.0%} of the last groups all answers got the same reward, so they teach nothing: choose "
            "prompts that the model solves sometimes, raise --n-samples-per-prompt, or drop such groups with "
            "--dynamic-sampling-filter-path."
        )
    total = sum(where["total"].values())
    if total:
        shares = sorted(((v / total, k) for k, v in where["total"].items()), reverse=True)
        said.append("Most time: " + ", ".join(f"{cause} {share:.0%}" for share, cause in shares[:4]) + ".")
        what = "GPUs" if run.has_gpus else "processes"
        lost = where["total"].get("longest answer", 0.0) / total
        if lost > 0.1:
            said.append(f"{lost:.0%} of the {what}' time is spent waiting for the longest 3 % of the answers.")
        if (idle := where["total"].get(IDLE, 0.0) / total) > 0.2:
            said.append(f"The {what} are idle for {idle:.0%} of the time.")
    return [sentence for sentence in said + _troubles(run) if sentence]


def _troubles(run: Run) -> list[str]:
    """Return what failed, died and came back."""
    errors = [one["text"] for one in run.events if one["event"] == "error"]
    evicted = [one for one in run.events if one["event"] == "engine" and one.get("state") == "evicted"]
    recovery = [one["text"] for one in run.events if one.get("where", "").endswith(".trainer_recovery")]
    deaths = [text for text in recovery if " died" in text]
    starts = sum(one["event"] == "start" for one in run.events)
    said = [f"It failed: {errors[-1]}"] if errors and run.state == "failed" else []
    if evicted:
        were = "was" if len(evicted) == 1 else "were"
        said.append(f"{_count('engine', len(evicted))} {were} evicted; the first: {evicted[0].get('why')}")
    if deaths:
        said.append(f"The trainer died {_count('time', len(deaths))} ({deaths[-1]}) {recovery[-1]}")
    return said + ([f"It was started {_count('time', starts)}."] if starts > 1 else [])


def _count(what: str, count: int) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _went(what: str, values: Sequence[Any], answers: Sequence[Rollout]) -> str:
    """Say how ``values`` went from the first tenth, at most ``RECENT``, to the last; ``answers`` tell their noise."""
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(numbers) < 2:
        return f"{what.capitalize()}: {numbers[0]:.3g}." if numbers else ""
    width = max(1, min(RECENT, len(numbers) // 10))
    first, last = sum(numbers[:width]) / width, sum(numbers[-width:]) / width
    best = "" if what == "loss" else f" (best {max(numbers):.3g})"
    if abs(last - first) <= 0.01 * abs(first):
        return f"{what.capitalize()} stayed at {last:.3g}{best}."
    if answers:
        both = answers[:width], answers[-width:]
        ends = [[reward for one in end for reward in prompt_rewards(one)] for end in both]
        if not abs(last - first) > 2 * math.hypot(*map(_standard_error, ends)):
            count = min(map(len, ends))
            return f"{what.capitalize()}: no clear change (n={count} prompts), {first:.3g} to {last:.3g}{best}."
    return f"{what.capitalize()} {'rose' if last > first else 'fell'} from {first:.3g} to {last:.3g}{best}."


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


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


# Time


def time_of(run: Run, rollouts: Sequence[Rollout] = ()) -> dict[str, Any]:
    """Return GPU-seconds by cause, in all and by step, the timelines of steps, and the engines' speed."""
    first_ranks = [span for span in _own_spans(run) if not _RANK.search(span.process)]
    steps = sorted((span for span in first_ranks if span.name == "step"), key=lambda span: span.start)
    if not first_ranks:
        return {"total": {}, "steps": [], "timelines": [], "causes": list(CAUSES), "plots": []}
    begin, end = min(span.start for span in first_ranks), max(span.end for span in first_ranks)
    bounds = [begin]
    pauses = _pauses(run, first_ranks)
    moments = [
        *(span.start for span in steps),
        *(span.end for span in steps),
        *(one for p in pauses for one in p),
        end,
    ]
    for moment in sorted(moments):
        if moment > bounds[-1] + SAME_MOMENT_S:
            bounds.append(moment)
    intervals = gpu_seconds(first_ranks, run.gpu_classes, bounds)
    total: dict[str, float] = {}
    for start, interval in zip(bounds, intervals):
        if any(stop - SAME_MOMENT_S <= start < again - SAME_MOMENT_S for stop, again in pauses):
            continue
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
    steps = steps[:: max(1, math.ceil(len(steps) / MAX_TIMELINES))]
    engines = {name: name for one in rollouts for name in one.rates}
    rates = {one.number: one.rates for one in rollouts}
    speed = Plot("Tokens per second of an answer, by engine", "Medians.", engines, alarms=("straggling engine",))
    return {
        "total": {cause: round(total[cause], 3) for cause in CAUSES if cause in total},
        "steps": rows[:: max(1, math.ceil(len(rows) / MAX_POINTS))],
        "timelines": _timelines(steps, _own_spans(run), rollouts),
        "plots": plots_of(rates, [speed]) if engines else [],
        "causes": list(CAUSES),
        "cause_of": ENGINE_SPANS | TRAINER_SPANS,
        "gpus": sum(one.num_gpus for one in run.gpu_classes),
        "unit": "GPU" if run.has_gpus else "logical GPU",
        "wall": round(end - begin - sum(again - stop for stop, again in pauses), 3),
    }


def _own_spans(run: Run) -> list[Span]:
    """Return the spans of the run itself: a recorded rollout that it took brings those of the run that made it."""
    begin = min((span.start for span in run.spans if span.process == "driver"), default=0.0)
    return [span for span in run.spans if span.start >= begin - SAME_MOMENT_S]


def _pauses(run: Run, spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Return the times between the end of a job of this run and the start of the next one, which no GPU counts.

    A job that was killed ends with its last span or event.
    """
    ends = [one["time"] for one in run.events if one["event"] in ("finish", "failed") and "time" in one]
    signs = [*(one["time"] for one in run.events if "time" in one), *(span.start for span in spans)]
    stops: dict[float, float] = {}  # start of a job -> end of the one before
    for again in (span.start for span in spans if (span.name, span.process) == ("start", "driver")):
        if before := [moment for moment in signs if moment < again - SAME_MOMENT_S]:
            stops[again] = max(before)
    for stop in ends:
        if later := [span.start for span in spans if span.start >= stop]:
            stops[min(later)] = stop
    found = []
    for again, stop in sorted(stops.items()):
        under_way = max((span.end for span in spans if span.start < again - SAME_MOMENT_S), default=stop)
        if max(stop, under_way) < again:
            found.append((max(stop, under_way), again))
    return found


def _timelines(steps: Sequence[Span], spans: Sequence[Span], rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    """Return the spans within each step, and the answers that engines gave in it: the slowest ones and others.

    All of the first ranks, and the longest of the others as far as the page has room.
    """
    room = max(40, MAX_SPANS // max(1, len(steps)))
    spans = sorted((one for one in spans if one.name not in ("step", "train_wait")), key=lambda one: one.start)
    starts, longest = [one.start for one in spans], max((one.end - one.start for one in spans), default=0.0)
    answers = {one.number: one.answers for one in rollouts}
    found = []
    for step in steps:
        number = step.rollout or 0
        nearby = spans[bisect.bisect_left(starts, step.start - longest) : bisect.bisect_left(starts, step.end)]
        within = [one for one in nearby if one.end > step.start]
        within.sort(key=lambda o: (bool(_RANK.search(o.process)), o.name not in ENGINE_SPANS, o.start - o.end))
        found.append({
            "step": number + 1,
            "seconds": round(step.end - step.start, 3),
            "spans": [
                [one.process, one.name, round(one.start - step.start, 3), round(one.end - one.start, 3)]
                for one in sorted(within[:room], key=lambda one: (one.process, one.start))
            ],
            "answers": [
                [round(start - step.start, 3), round(end - start, 3), tokens, engine]
                for start, end, tokens, engine in sorted([*answers.get(number, ()), *answers.get(number + 1, ())])
                if end > step.start and start < step.end
            ],
        })  # fmt: skip
    return found


if __name__ == "__main__":
    main()
