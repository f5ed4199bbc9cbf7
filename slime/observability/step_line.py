"""The line that the driver prints for each step, from ``metrics.jsonl``.

step 12/40 | reward 0.683 | loss 0.0012 | grad 0.412 | gen 4.1k tok/s | 3.9 s = rollout 1.9 + train 1.6 + push 0.2
  eval held_out 0.951 | eval held_out_greedy 0.988

A line has at most ``MAX_CHARS`` characters; metrics that do not fit are only in ``metrics.jsonl``.  Evaluations follow
on lines of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slime.observability import telemetry
from slime.observability.metrics_file import NewRecords, evaluations

MAX_CHARS = 120
_LEFT_OUT_FIRST = (
    "lr",
    "packed",
    "entropy",
    "kl",
    "len",
    "train",
    "gen",
    "|dlogp|",
    "value loss",
    "grad",
    "loss",
    "reward",
)
# label, metric names (the first one present is shown), format
_FIELDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("rollout/raw_reward", "rollout/rewards"), "{:.3f}"),
    ("loss", ("train/loss",), "{:.4f}"),
    ("value loss", ("train/critic-value_loss",), "{:.4f}"),
    ("kl", ("train/kl_loss", "train/ppo_kl"), "{:.5f}"),
    ("entropy", ("train/entropy_loss",), "{:.3f}"),
    ("grad", ("train/grad_norm",), "{:.3f}"),
    ("lr", ("train/lr-pg_0",), "{:.2e}"),
    ("|dlogp|", ("train/train_rollout_logprob_abs_diff",), "{:.4f}"),
    ("len", ("rollout/response_len/mean",), "{:.1f}"),
)
_RATES = (("gen", "perf/rollout_tok_per_s"), ("train", "perf/train_tok_per_s"))
_PHASES = (
    ("rollout", ("perf/time_wait_for_rollout_s", "perf/time_rollout_s", "perf/rollout_time")),
    ("critic", ("perf/time_train_critic_s",)),
    ("train", ("perf/time_train_s", "perf/train_time", "perf/actor_train_time")),
    ("push", ("perf/time_push_s", "perf/weight_push_s", "perf/update_weights_time")),
    ("save", ("perf/time_save_s", "perf/save_model_time")),
    ("eval", ("perf/time_eval_s",)),
)
"""The driver's waits, in order; they add up to the step.  Finer spans are in ``metrics.jsonl``."""


def _first(metrics: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    for name in names:
        value = metrics.get(name)
        if isinstance(value, int | float):
            return float(value)
    return None


def _short(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def format_step(rollout_id: int, metrics: Mapping[str, Any], *, num_rollout: int | None = None) -> str:
    """Return the line of step ``rollout_id`` (displayed from 1), without metrics that were not measured.

    Evaluations follow in indented lines.
    """
    parts = {"step": f"step {rollout_id + 1}" + (f"/{num_rollout}" if num_rollout else "")}
    for label, names, shape in _FIELDS:
        value = _first(metrics, names)
        if value is not None:
            parts[label] = f"{label} {shape.format(value)}"
    for label, name in _RATES:
        value = _first(metrics, (name,))
        if value is not None:
            parts[label] = f"{label} {_short(value)} tok/s"
    packed = _first(metrics, ("perf/packing_efficiency",))
    if packed is not None:
        parts["packed"] = f"packed {packed:.0%}"
    phases = [(label, value) for label, names in _PHASES if (value := _first(metrics, names)) is not None]
    total = _first(metrics, ("perf/time_step_s", "perf/step_time"))
    if phases:
        spans = " + ".join(f"{label} {_seconds(value)}" for label, value in phases)
        parts["seconds"] = f"{_seconds(total)} s = {spans}" if total is not None else f"seconds: {spans}"
    for label in _LEFT_OUT_FIRST:
        if len(" | ".join(parts.values())) > MAX_CHARS:
            parts.pop(label, None)
    lines = [" | ".join(parts.values()), *_packed(f"eval {k} {v:.3f}" for k, v in evaluations(metrics).items())]
    return "\n".join(line if len(line) <= MAX_CHARS else line[: MAX_CHARS - 3] + "..." for line in lines)


def _packed(parts: Iterable[str]) -> list[str]:
    """Return indented lines that hold as many of ``parts`` as fit."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(" | ") + len(part) <= MAX_CHARS:
            lines[-1] += f" | {part}"
        else:
            lines.append(f"  {part}")
    return lines


class StepLine:
    """Reads ``metrics.jsonl``: each :meth:`line` shows the metrics logged since the last one.

    Records already in the file are skipped.  Records of a later rollout (generated ahead of time) are kept for that
    rollout's line.
    """

    def __init__(self, path: Path | None, *, num_rollout: int | None = None) -> None:
        self._new = NewRecords(path)
        self._num_rollout = num_rollout
        self._early: list[dict[str, Any]] = []

    def gather(self, step: int) -> dict[str, Any]:
        """Return the metrics logged since the last call, up to the rollout with x-axis value ``step``."""
        records = self._early + self._new.read()
        merged: dict[str, Any] = {}
        self._early = []
        for record in records:
            if record.get("rollout/step", step) > step:
                self._early.append(record)
            else:
                merged.update(record)
        return merged

    def line(self, rollout_id: int, step: int | None = None) -> str:
        """Return the line of ``rollout_id``, followed by the sinks' remarks, one per line.

        ``step`` is its x-axis value (``compute_rollout_step``); None means ``rollout_id``.
        """
        metrics = self.gather(rollout_id if step is None else step)
        remarks = "".join(f"\n  {text}" for text in telemetry.remarks(rollout_id, metrics))
        return format_step(rollout_id, metrics, num_rollout=self._num_rollout) + remarks
