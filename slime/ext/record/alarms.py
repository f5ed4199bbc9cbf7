"""Alarms of a run, found in its metrics: pure functions of step -> metrics, which say when it began and why; and the
sink that has the driver tell them.

They judge the last steps against the first ones, so that they need no setting; each can only be a hint.  Those that
read ``samples/...`` look at what a report computes from the recorded samples (``tools/report_samples.py``).
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from slime.observability import telemetry
from slime.observability.telemetry import Sink

WINDOW = 5
"""Steps that are averaged, at the start of the run and up to the step that is judged."""
LOOK_BACK = 200
"""Steps that the driver looks back."""
Steps = Mapping[int, Mapping[str, Any]]
EXPERT_LAYER = re.compile(r"train/expert_load/layer_(\d+)/idle")


@dataclass(frozen=True, slots=True)
class Alarm:
    """One finding."""

    name: str
    step: int
    """The first at which it held."""
    text: str


def _series(steps: Steps, name: str) -> list[tuple[int, float]]:
    return [
        (step, float(metrics[name]))
        for step, metrics in sorted(steps.items())
        if isinstance(metrics.get(name), int | float)
    ]


def _means(steps: Steps, name: str) -> list[tuple[int, float]]:
    """Return each step with the mean of the ``WINDOW`` values up to it; the first one is the start of the run."""
    values = _series(steps, name)
    windows = [values[end - WINDOW : end] for end in range(WINDOW, len(values) + 1)]
    return [(window[-1][0], fmean(value for _, value in window)) for window in windows]


def _first(steps: Steps, name: str, holds: Callable[[float, float], bool], why: str, alarm: str) -> list[Alarm]:
    """Return an alarm for the first window of which ``holds(mean at the start, mean now)`` is true."""
    means = _means(steps, name)
    for step, now in means[1:]:
        begin = means[0][1]
        if holds(begin, now):
            return [Alarm(alarm, step, f"{why}: {name} went from {begin:.4g} to {now:.4g}")]
    return []


def collapse(steps: Steps) -> list[Alarm]:
    """Find a reward that fell to less than half of the best mean."""
    best = 0.0
    for step, now in _means(steps, "rollout/raw_reward"):
        best = max(best, now)
        if best > 0 and now < best / 2:
            return [Alarm("collapse", step, f"the reward collapsed: its mean fell from {best:.4g} to {now:.4g}")]
    return []


def length_explosion(steps: Steps) -> list[Alarm]:
    """Find responses that grew to twice their first length, or of which most are cut off."""
    longer = _first(
        steps, "rollout/response_len/mean", lambda begin, now: begin > 0 and now > 2 * begin,
        "responses grow", "length explosion",
    )  # fmt: skip
    cut = _first(
        steps, "rollout/truncated_ratio", lambda begin, now: now > 0.5 and now > begin + 0.2,
        "most responses are cut off", "length explosion",
    )  # fmt: skip
    return min([longer, cut], key=lambda found: found[0].step if found else 1 << 60)


def all_zero_rewards(steps: Steps) -> list[Alarm]:
    """Find steps in a row of which no response got a reward: a grader or a template that does not fit.

    A step whose policy loss is not 0, or that has none, has another teacher: distillation, a value function, a loss of
    the user's.
    """
    untaught = {n: one for n, one in steps.items() if "train/loss" not in one or one.get("train/pg_loss") == 0}
    values = _series(untaught, "rollout/raw_reward")
    for rows in (values[i : i + 3] for i in range(len(values) - 2)):
        if all(value == 0 for _, value in rows):
            text = "no response got a reward: look at the grader, the chat template and the label"
            return [Alarm("all-zero rewards", rows[0][0], text)]
    return []


def length_pays(steps: Steps) -> list[Alarm]:
    """Find responses that grow because longer ones get more reward: a reward that is earned with length alone."""
    names = ("samples/length_pays", "samples/length/middle", "samples/reward/mean")
    whole = {n: one for n, one in steps.items() if all(isinstance(one.get(name), int | float) for name in names)}
    means = [_means(whole, name) for name in names]
    for now in list(zip(*means))[WINDOW:]:
        (step, pays), (_, length), (_, reward) = now
        first_length, first_reward = means[1][0][1], means[2][0][1]
        if pays > 0.5 and length > 1.5 * first_length and reward > first_reward:
            text = f"the reward is earned with length: within groups they correlate by {pays:.2f}, and responses grew "
            text += f"from {first_length:.0f} to {length:.0f} tokens; read the longest answers with the most reward"
            return [Alarm("length pays", step, text)]
    return []


def growing_mismatch(steps: Steps) -> list[Alarm]:
    """Find a difference between the trainer's and the engine's log-probs that is large, or grows."""
    return _first(
        steps, "train/train_rollout_logprob_abs_diff",
        lambda begin, now: now > 0.1 or (now > 0.01 and now > 3 * begin),
        "trainer and engine disagree about the tokens that they trained on, so the engine draws from other weights or "
        "another distribution than the trainer takes them for (off-policy)", "mismatch",
    )  # fmt: skip


def late_pushes(steps: Steps) -> list[Alarm]:
    """Find engines whose version stays the same for longer than the interval between two pushes."""
    for step, value in _series(steps, "samples/late_pushes"):
        if value >= 2:
            version = steps[step].get("samples/newest_version")
            text = f"engines still answer with version {version}, {value:.0f} pushes late: look at the pushes' events"
            return [Alarm("late pushes", step, text)]
    return []


def straggling_engine(steps: Steps) -> list[Alarm]:
    """Find an engine that gives less than half of the tokens per second of the others, three rollouts in a row."""
    values = _series(steps, "samples/slowest_share")
    for rows in (values[i : i + 3] for i in range(len(values) - 2)):
        names = {steps[step].get("samples/slowest_engine") for step, _ in rows}
        if len(names) == 1 and all(share < 0.5 for _, share in rows):
            text = f"engine {names.pop()} is slow: its answers get {rows[0][1]:.0%} of the others' tokens per second"
            return [Alarm("straggling engine", rows[0][0], text)]
    return []


def foreign_template(steps: Steps) -> list[Alarm]:
    """Find prompts with marks of a chat template that the model does not know."""
    for step, metrics in sorted(steps.items()):
        if marks := metrics.get("samples/foreign_markers"):
            text = f"wrong chat template: the prompts have {marks}, which this model reads as plain letters"
            return [Alarm("chat template", step, text)]
    return []


def few_choices(steps: Steps) -> list[Alarm]:
    """Find an entropy that is next to nothing beside the first one, so that nothing new is tried."""
    return _first(
        steps, "train/entropy_loss", lambda begin, now: begin > 0.01 and now < 0.02 * begin,
        "the policy tries nothing new", "entropy collapse",
    )  # fmt: skip


def large_gradients(steps: Steps) -> list[Alarm]:
    """Find gradients that grow to ten times the first ones."""
    return _first(
        steps, "train/grad_norm", lambda begin, now: begin > 0 and now > 10 * begin,
        "gradients explode", "large gradients",
    )  # fmt: skip


def equal_groups(steps: Steps) -> list[Alarm]:
    """Find rollouts almost all of whose groups have equal rewards, so that they train nothing, and did not before."""
    return _first(
        steps, "samples/equal_groups", lambda begin, now: now > 0.95 and begin < 0.9,
        "almost no group trains anything: all answers to a prompt get the same reward", "equal groups",
    )  # fmt: skip


def repeated_answers(steps: Steps) -> list[Alarm]:
    """Find answers that repeat each other while the reward fell."""
    rewards = [mean for _, mean in _means(steps, "samples/reward/mean")]
    found = _first(
        steps, "samples/duplicates", lambda begin, now: now > 0.9 and begin < 0.5,
        "the answers to a prompt are all the same", "duplicates",
    )  # fmt: skip
    return found if rewards and rewards[-1] < rewards[0] else []


def dead_experts(steps: Steps) -> list[Alarm]:
    """Find experts that get no token (``--log-expert-load``)."""
    values = _series(steps, "train/expert_load/worst_idle")
    for step, value in values:
        if value > 0:
            return [
                Alarm("dead experts", step, f"{value:.1%} of the experts of {_worst_layers(steps[step])} get no token")
            ]
    return []


def _worst_layers(metrics: Mapping[str, Any]) -> str:
    layers = [match[1] for name, value in metrics.items() if (match := EXPERT_LAYER.fullmatch(name)) and value > 0]
    return f"layer {', '.join(sorted(layers, key=int))}" if layers else "a layer"


def broken_numbers(steps: Steps) -> list[Alarm]:
    """Find a gradient or a loss that is no finite number; the file of metrics has it as text."""
    for step, metrics in sorted(steps.items()):
        for name in ("train/grad_norm", "train/loss"):
            if metrics.get(name) in ("nan", "inf", "-inf"):
                return [Alarm("broken numbers", step, f"{name} is {metrics[name]}")]
    return []


ALARMS = (
    all_zero_rewards, foreign_template, collapse, length_explosion, length_pays, repeated_answers, few_choices,
    equal_groups, growing_mismatch, late_pushes, straggling_engine, dead_experts, large_gradients, broken_numbers,
)  # fmt: skip


def find_alarms(steps: Steps) -> list[Alarm]:
    """Return every alarm of a run, by the step at which it began."""
    return sorted((alarm for find in ALARMS for alarm in find(steps)), key=lambda alarm: alarm.step)


class AlarmSink(Sink):
    """Remarks on the step at which an alarm is found."""

    def __init__(self, args: Namespace, process: str, *, primary: bool) -> None:
        self._seen: dict[int, Mapping[str, Any]] = {}
        self._known: set[str] = set()

    def remarks(self, rollout_id: int, metrics: Mapping[str, Any]) -> list[str]:
        self._seen[rollout_id] = metrics
        if len(self._seen) > WINDOW + LOOK_BACK:
            del self._seen[sorted(self._seen)[WINDOW]]  # the first ones are what later ones are compared with
        found = [alarm for alarm in find_alarms(self._seen) if alarm.name not in self._known]
        self._known |= {alarm.name for alarm in found}
        for alarm in found:
            telemetry.event("alarm", name=alarm.name, rollout=alarm.step, text=alarm.text)
        return [f"ALARM {alarm.text}" for alarm in found]
