"""Each alarm on a run that has its fault, at its step; none on a healthy one."""

from __future__ import annotations

import pytest

from slime.observability.alarms import find_alarms

HEALTHY = {
    "rollout/raw_reward": lambda step: 0.3 + 0.02 * step,
    "rollout/response_len/mean": lambda step: 100.0 + step,
    "rollout/truncated_ratio": lambda step: 0.05,
    "train/train_rollout_logprob_abs_diff": lambda step: 0.004,
    "train/expert_load/worst_idle": lambda step: 0.0,
    "train/grad_norm": lambda step: 0.5,
}


def run(**faults):
    metrics = HEALTHY | {name.replace("__", "/"): value for name, value in faults.items()}
    return {step: {name: value(step) for name, value in metrics.items()} for step in range(20)}


def test_a_healthy_run_has_no_alarm_and_neither_has_one_that_has_just_begun():
    assert find_alarms(run()) == []
    assert find_alarms({}) == []
    assert find_alarms({0: {"rollout/raw_reward": 0.0}, 1: {"rollout/raw_reward": 0.0}}) == []


@pytest.mark.parametrize(
    ("name", "step", "metric", "value"),
    [
        ("collapse", 12, "rollout/raw_reward", lambda step: 0.8 if step < 10 else 0.1),
        ("length explosion", 12, "rollout/response_len/mean", lambda step: 100.0 if step < 10 else 300.0),
        ("length explosion", 12, "rollout/truncated_ratio", lambda step: 0.05 if step < 10 else 0.95),
        ("all-zero rewards", 0, "rollout/raw_reward", lambda step: 0.0),
        ("mismatch", 11, "train/train_rollout_logprob_abs_diff", lambda step: 0.004 if step < 10 else 0.03),
        ("dead experts", 7, "train/expert_load/worst_idle", lambda step: 0.25 if step == 7 else 0.0),
        ("broken numbers", 3, "train/grad_norm", lambda step: "nan" if step == 3 else 0.5),
    ],
)
def test_a_fault_is_found_at_its_step(name, step, metric, value):
    assert [(one.name, one.step) for one in find_alarms(run(**{metric: value}))] == [(name, step)]
