"""What goes wrong in a run, found in its metrics: pure functions of step -> metrics, which say when it began and why.

They judge the last steps against the first ones, so that they need no setting; each can only be a hint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean

WINDOW = 5
"""Steps that are averaged, at the start of the run and up to the step that is judged."""
Steps = Mapping[int, Mapping[str, float]]


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


def _first(steps: Steps, name: str, holds: Callable[[float, float, float], bool], why: str, alarm: str) -> list[Alarm]:
    """Return an alarm for the first window of which ``holds(mean at the start, mean now, last)`` is true."""
    values = _series(steps, name)
    begin = fmean([value for _, value in values[:WINDOW]]) if len(values) >= WINDOW else 0.0
    for position in range(WINDOW, len(values)):
        now = fmean([value for _, value in values[position - WINDOW + 1 : position + 1]])
        if holds(begin, now, values[position][1]):
            return [Alarm(alarm, values[position][0], f"{why}: {name} went from {begin:.4g} to {now:.4g}")]
    return []


def collapse(steps: Steps) -> list[Alarm]:
    """Find a reward that fell to less than half of the best mean, and an entropy of next to nothing beside it."""
    values = _series(steps, "rollout/raw_reward")
    best = 0.0
    for position in range(WINDOW - 1, len(values)):
        now = fmean([value for _, value in values[position - WINDOW + 1 : position + 1]])
        best = max(best, now)
        if best > 0 and now < best / 2:
            text = f"the reward collapsed: its mean fell from {best:.4g} to {now:.4g}"
            return [Alarm("collapse", values[position][0], text)]
    return []


def length_explosion(steps: Steps) -> list[Alarm]:
    """Find responses that grew to twice their first length, or of which most are cut off."""
    longer = _first(
        steps, "rollout/response_len/mean", lambda begin, now, last: begin > 0 and now > 2 * begin,
        "responses grow", "length explosion",
    )  # fmt: skip
    cut = _first(
        steps, "rollout/truncated_ratio", lambda begin, now, last: now > 0.5 and now > begin + 0.2,
        "most responses are cut off", "length explosion",
    )  # fmt: skip
    return min([longer, cut], key=lambda found: found[0].step if found else 1 << 60)


def all_zero_rewards(steps: Steps) -> list[Alarm]:
    """Find steps in a row of which no response got a reward: a grader or a template that does not fit."""
    values = _series(steps, "rollout/raw_reward")
    for (first, _), *rest in (values[i : i + 3] for i in range(len(values) - 2)):
        if all(value == 0 for _, value in rest) and dict(values)[first] == 0:
            text = "no response got a reward: look at the grader, the chat template and the label"
            return [Alarm("all-zero rewards", first, text)]
    return []


def growing_mismatch(steps: Steps) -> list[Alarm]:
    """Find a difference between the trainer's and the engine's log-probs that is large, or grows."""
    return _first(
        steps, "train/train_rollout_logprob_abs_diff",
        lambda begin, now, last: now > 0.1 or (now > 0.01 and now > 3 * begin),
        "trainer and engine disagree", "mismatch",
    )  # fmt: skip


def dead_experts(steps: Steps) -> list[Alarm]:
    """Find experts that get no token (``--log-expert-load``)."""
    values = _series(steps, "train/expert_load/worst_idle")
    for step, value in values:
        if value > 0:
            return [Alarm("dead experts", step, f"{value:.1%} of the experts of a layer get no token")]
    return []


def broken_numbers(steps: Steps) -> list[Alarm]:
    """Find a gradient or a loss that is no finite number; the file of metrics has it as text."""
    for step, metrics in sorted(steps.items()):
        for name in ("train/grad_norm", "train/loss"):
            if metrics.get(name) in ("nan", "inf", "-inf"):
                return [Alarm("broken numbers", step, f"{name} is {metrics[name]}")]
    return []


ALARMS = (all_zero_rewards, collapse, length_explosion, growing_mismatch, dead_experts, broken_numbers)


def find_alarms(steps: Steps) -> list[Alarm]:
    """Return every alarm of a run, by the step at which it began."""
    return sorted((alarm for find in ALARMS for alarm in find(steps)), key=lambda alarm: alarm.step)
