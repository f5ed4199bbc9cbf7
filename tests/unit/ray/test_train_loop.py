"""The driver's part of a step's record and line."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import train
from slime.flags.observability import TrackingConfig
from slime.observability import telemetry
from slime.observability.metrics_file import append_record, metrics_path, read_records
from slime.observability.step_line import StepLine
from slime.ray import waiting
from slime.ray.train_loop import TrainJob, tell_if_finished
from slime.ray.trainers import Trainers


def test_with_optimizer_steps_as_axis_a_step_has_its_own_metrics_and_its_times_beside_them(tmp_path: Path, capsys):
    job = TrainJob.__new__(TrainJob)
    job.args = Namespace(
        save=str(tmp_path), wandb_always_use_train_step=True, rollout_batch_size=32, n_samples_per_prompt=8,
        global_batch_size=64, num_rollout=9,
    )  # fmt: skip
    telemetry.start(job.args, "driver")
    path = metrics_path(TrackingConfig.of(job.args))
    assert path is not None
    job._background, job._step_began, job._step_line = None, 0.0, StepLine(path, num_rollout=9)
    for rollout_id in range(3):
        append_record(path, {"rollout/step": 4 * rollout_id, "rollout/raw_reward": rollout_id / 8})
        append_record(
            path, {"rollout/step": 4 * (rollout_id + 1), "rollout/response_len/mean": 7.0}
        )  # of a later rollout
        telemetry.Timer().reset()
        telemetry.Timer().add("train", 3.0)
        telemetry.Timer().add("train_critic", 2.0)
        job.report(rollout_id)
    telemetry.stop()
    assert [line.split(" | ")[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["step 1/9", "reward 0.000"],
        ["step 2/9", "reward 0.125"],
        ["step 3/9", "reward 0.250"],
    ]
    records = [record for record in read_records(path) if "perf/time_train_s" in record]
    assert [record["rollout/step"] for record in records] == [0, 4, 8]
    assert all((record["perf/time_train_s"], record["perf/time_train_critic_s"]) == (1.0, 2.0) for record in records)


@pytest.mark.parametrize(("start", "asked", "line"), [(30, 29, "step 30"), (0, 0, "step 0")])
def test_a_job_of_no_rollouts_evaluates_and_prints_the_step_of_the_checkpoint(
    monkeypatch, tmp_path, capsys, start, asked, line
):
    path = tmp_path / "metrics.jsonl"
    job = TrainJob.__new__(TrainJob)
    job.args = Namespace(num_rollout=0, start_rollout_id=start, eval_interval=20, wandb_always_use_train_step=False)
    job._step_line = StepLine(path, num_rollout=0)

    calls = []

    def evaluate(step, rollout_id, **_):
        calls.append(rollout_id)
        append_record(path, {"eval/step": rollout_id, "eval/held_out": 0.5, "perf/time_eval_s": 1.5})

    job.manager = Namespace(eval=Namespace(remote=lambda rollout_id: rollout_id))
    monkeypatch.setattr(job, "_wait_for_engines", evaluate)
    monkeypatch.setattr(job, "finish", lambda: calls.append("finish"))
    monkeypatch.setattr(train, "start_job", lambda args: job)
    train.train(job.args)
    assert calls == [asked, "finish"]
    assert capsys.readouterr().out == f"{line} | seconds: eval 1.5\n  eval held_out 0.500\n"


def test_a_resumed_run_with_nothing_left_says_so(caplog):
    for start, num, says in ((3, 3, True), (2, 3, False), (6, 0, False)):
        caplog.clear()
        tell_if_finished("runs/mine", start, num)
        assert ("raise --num-rollout" in caplog.text) == says


def test_while_the_last_evaluation_is_awaited_deaths_of_the_trainer_do_not_count(monkeypatch):
    monkeypatch.setattr(waiting, "_sentinels", {"a": "rank 0 of the actor", "b": "the rollout manager"})
    watched: list[list[str]] = []
    job = TrainJob.__new__(TrainJob)
    job._background = SimpleNamespace(finish=lambda: watched.append(list(waiting._sentinels.values())))
    actor: Any = SimpleNamespace(names=["rank 0 of the actor"], release=lambda flushes: None)
    job.args, job._locks = Namespace(shutdown_timeout_s=1), []
    job.trainers = Trainers(actor, None)
    monkeypatch.setattr(job, "_ask", lambda *_, **__: None)
    job.finish()
    assert watched == [["the rollout manager"]]
