"""Each alarm on a run with its fault, at its step; none on a healthy run."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime.ext.record.alarms import AlarmSink, find_alarms
from slime.observability import telemetry
from slime.observability.metrics_file import append_record
from slime.observability.step_line import StepLine

HEALTHY = {
    "rollout/raw_reward": lambda step: 0.3 + 0.02 * step,
    "rollout/response_len/mean": lambda step: 100.0 + step,
    "rollout/truncated_ratio": lambda step: 0.05,
    "train/train_rollout_logprob_abs_diff": lambda step: 0.004,
    "train/expert_load/worst_idle": lambda step: 0.0,
    "train/grad_norm": lambda step: 0.5,
    "train/loss": lambda step: 0.1,
    "train/pg_loss": lambda step: 0.0,
    "train/entropy_loss": lambda step: 1.0 / (step + 1),
    "samples/reward/mean": lambda step: 0.3 + 0.02 * step,
    "samples/length/middle": lambda step: 100.0 + 2 * step,
    "samples/length_pays": lambda step: 0.6,
    "samples/equal_groups": lambda step: 0.04 * step,
    "samples/duplicates": lambda step: 0.05 * step,
    "samples/late_pushes": lambda step: 0,
    "samples/slowest_share": lambda step: 0.9 if step % 3 else 0.4,
    "samples/slowest_engine": lambda step: "b:1",
}


def run(**faults):
    metrics = HEALTHY | {name.replace("__", "/"): value for name, value in faults.items()}
    return {step: {name: value(step) for name, value in metrics.items()} for step in range(20)}


def test_a_healthy_run_has_no_alarm_and_neither_has_one_that_has_just_begun():
    assert find_alarms(run()) == []
    assert find_alarms({}) == []
    assert find_alarms({0: {"rollout/raw_reward": 0.0}, 1: {"rollout/raw_reward": 0.0}}) == []


def test_without_rewards_a_teacher_may_teach_all_the_same():
    distilled = {"rollout__raw_reward": lambda step: 0.0, "train__pg_loss": lambda step: 0.2}
    assert find_alarms(run(**distilled)) == []
    assert find_alarms(run(rollout__raw_reward=lambda step: 0.0, train__pg_loss=lambda step: None)) == []


@pytest.mark.parametrize(
    ("name", "step", "metric", "value"),
    [
        ("collapse", 12, "rollout/raw_reward", lambda step: 0.8 if step < 10 else 0.1),
        ("length explosion", 12, "rollout/response_len/mean", lambda step: 100.0 if step < 10 else 300.0),
        ("length explosion", 12, "rollout/truncated_ratio", lambda step: 0.05 if step < 10 else 0.95),
        ("all-zero rewards", 0, "rollout/raw_reward", lambda step: 0.0),
        ("mismatch", 11, "train/train_rollout_logprob_abs_diff", lambda step: 0.004 if step < 10 else 0.03),
        ("dead experts", 7, "train/expert_load/worst_idle", lambda step: 0.25 if step == 7 else 0.0),
        ("entropy collapse", 14, "train/entropy_loss", lambda step: 1.0 if step < 10 else 0.001),
        ("large gradients", 12, "train/grad_norm", lambda step: 0.5 if step < 10 else 10.0),
        ("length pays", 16, "samples/length/middle", lambda step: 100.0 + 5 * step),
        ("equal groups", 14, "samples/equal_groups", lambda step: 0.2 if step < 10 else 1.0),
        ("late pushes", 4, "samples/late_pushes", lambda step: max(0, step - 2)),
        ("straggling engine", 6, "samples/slowest_share", lambda step: 0.9 if step < 6 else 0.3),
        ("chat template", 0, "samples/foreign_markers", lambda step: "" if step else "<|im_start|>"),
        ("broken numbers", 3, "train/grad_norm", lambda step: "nan" if step == 3 else 0.5),
    ],
)
def test_a_fault_is_found_at_its_step(name, step, metric, value):
    assert [(one.name, one.step) for one in find_alarms(run(**{metric: value}))] == [(name, step)]


def test_alarms_name_the_layers_the_engine_and_what_is_wrong():
    dead = run(train__expert_load__worst_idle=lambda step: 0.5, train__expert_load__layer_3__idle=lambda step: 0.5)
    assert "50.0% of the experts of layer 3 get no token" in find_alarms(dead)[0].text
    slow = run(samples__slowest_share=lambda step: 0.25)
    assert find_alarms(slow)[0].text.startswith("engine b:1 is slow: its answers get 25%")


def test_answers_that_repeat_each_other_are_a_fault_only_while_the_reward_falls():
    falls = {"samples/duplicates": lambda step: 0.1 if step < 10 else 1.0, "samples/reward/mean": lambda step: -step}
    assert [one.name for one in find_alarms(run(**falls))] == ["duplicates"]
    assert find_alarms(run(**falls | {"samples/reward/mean": lambda step: step})) == []


def test_an_alarm_stands_once_in_the_line_of_the_step_at_which_it_is_found(tmp_path):
    path = tmp_path / "metrics.jsonl"
    telemetry.start(Namespace(save=str(tmp_path)), "driver", (AlarmSink,))
    lines = StepLine(path)
    told = []
    for step in range(6):
        append_record(path, {"rollout/raw_reward": 0.0, "rollout/step": step})
        told.append("ALARM no response got a reward" in lines.line(step))
    assert told == [False, False, True, False, False, False]
    telemetry.stop()
