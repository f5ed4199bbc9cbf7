"""Real jobs whose trainer dies and recovers, and a trainerless job that ends when its engine dies."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from slime.observability.metrics_file import read_records
from tests.e2e.job import GONE_S, JOB_S, STEP_S, Job, grpo_flags, records, replay_flags

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.faults,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path; scripts/run-tiny-gpu.sh is the GPU's"),
]


def digests(folder: Path) -> dict[str, dict[int, str]]:
    """Return role -> rollout -> digest of its weights, as recorded by the run in ``folder``."""
    found: dict[str, dict[int, str]] = {"actor": {}, "critic": {}}
    for one in read_records(folder / "events.jsonl"):
        if one["event"] == "weights":
            found[one["role"]][one["rollout"]] = one["digest"]
    return found


@pytest.fixture(scope="module")
def recorded(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record four rollouts of an engine without a trainer, until the engine dies."""
    folder = tmp_path_factory.mktemp("recorded")
    flags = grpo_flags(
        task, folder, *"--actor-num-gpus-per-node 1 --rollout-num-gpus 1 --debug-rollout-only".split(),
        # Responses long enough to be interrupted.
        *"--rollout-max-response-len 200 --num-rollout 1000 --save-interval 1000".split(),
    )  # fmt: skip
    job = Job("train.py", flags, folder / "log.txt")
    job.wait_until(lambda: (folder / "dump/3.pt").exists(), "fourth rollout", STEP_S)
    job.strike("slime.backends.sglang_utils.server_main", r"EngineDiedError: engine 0 .*killed by signal 9")
    return folder


def test_an_engine_generates_without_a_trainer_until_it_dies(recorded):
    assert "MegatronTrainRayActor" not in (recorded / "log.txt").read_text()
    for rollout_id in range(4):
        samples = torch.load(recorded / f"dump/{rollout_id}.pt", weights_only=False)["samples"]
        assert len(samples) == 16 and all(sample["response_length"] > 0 for sample in samples)


def test_engines_stay_when_the_trainer_dies_and_the_job_ends_when_it_dies_again(task, tmp_path):
    flags = grpo_flags(
        task, tmp_path, *"--actor-num-gpus-per-node 1 --rollout-num-gpus 1 --num-rollout 200".split(),
        *"--max-recoveries 1 --check-weight-update-equal".split(),
    )  # fmt: skip
    job = Job("train.py", flags, tmp_path / "log.txt")
    job.wait_until(lambda: "step 1/200" in job.text(), "first step", STEP_S)
    engines = job.pids("slime.backends.sglang_utils.server_main")
    os.kill(job.pids("ray::MegatronTrainRayActor")[0], signal.SIGKILL)
    job.wait_until(lambda: "The trainer is back after" in job.text(), "restart of the trainer", STEP_S)
    assert job.pids("slime.backends.sglang_utils.server_main") == engines
    steps = job.text().count("\nstep ")
    job.wait_until(lambda: job.text().count("\nstep ") >= steps + 2, "two more steps", STEP_S)
    job.strike("ray::MegatronTrainRayActor", r"EngineDiedError: (actor rank 0 died|an actor died during training)")


def test_ppo_trains_its_critic_first_and_deaths_of_either_take_both_back_and_change_no_bit(task, recorded, tmp_path):
    """Runs on recorded rollouts, and compares with a replay in which nothing dies.

    The critic dies before both have trained a rollout and before any checkpoint, so both return to the start;
    the actor dies later, and both return to the copies in memory; then it dies with those copies, and both return
    to the checkpoint.
    """
    roles = tmp_path / "roles.yaml"
    roles.write_text("megatron:\n  - {name: values, role: critic, overrides: {lr: 1e-3}}\n")
    hook = "tests.e2e.dying_trainer.the_critic_dies_in_rollout_1_and_the_actor_in_2_and_with_the_copies_in_3"
    flags = replay_flags(
        task, tmp_path, f"{recorded}/dump/{{rollout_id}}.pt",
        *"--actor-num-gpus-per-node 1 --advantage-estimator ppo --num-critic-only-steps 1 --num-rollout 4".split(),
        *("--megatron-config-path", str(roles), "--trainer-recovery", "memory", "--save-interval", "2"),
        *("--custom-megatron-before-train-step-hook-path", hook),
    )  # fmt: skip
    (tmp_path / "critic").mkdir()  # for the mark that it has died, before its first checkpoint
    job = Job("train.py", flags, tmp_path / "log.txt")
    assert job.finish(JOB_S) == 0, job.text()[-4000:]
    assert re.findall(r"(\w+) rank 0 died", job.text())[:3] == ["critic", "actor", "actor"]
    went_on = re.findall(r"resumed at rollout (\d+) and repeated training on (\d+) rollouts", job.text())
    assert went_on == [("0", "1"), ("2", "0"), ("2", "1")]  # from the start, from the copies, from the checkpoint
    assert re.findall(r"resumes from the copies in memory after rollout (\d+)", job.text()) == ["1", "1"]
    assert "copies in memory are lost" in job.text()
    critic_steps = records(tmp_path, "train/critic-value_loss")
    assert [step["train/step"] for step in critic_steps] == [0, 1, 2, 0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 4, 5, 6, 7]
    assert {step["train/critic-lr-pg_0"] for step in critic_steps} == {1e-3}
    actor_steps = records(tmp_path, "train/pg_loss")
    assert [step["train/step"] for step in actor_steps] == [2, 3, 4, 4, 5, 6, 4, 5, 6, 7]
    assert all("rollout/values" in record for record in records(tmp_path, "rollout/returns"))
    explained = [row["rollout/step"] for row in records(tmp_path, "rollout/explained_variance")]
    assert explained == [0, 1, 0, 1, 2, 2, 3, 2, 3]
    for folder in (tmp_path, tmp_path / "critic"):
        assert (folder / "latest_checkpointed_iteration.txt").read_text() == "3"
    job.seconds_until_gone(GONE_S)
    for rollout_id in (1, 3):
        (tmp_path / f"iter_{rollout_id:07d}").rename(tmp_path / f"hidden_{rollout_id}")  # so it begins at the start
    out = tmp_path / "again"
    for folder in (out, out / "critic"):
        folder.mkdir()
        for rollout_id in (1, 2, 3):
            (folder / f"died_in_{rollout_id}").touch()  # nothing dies in the replay
    again = Job("tools/replay.py", [str(tmp_path), "--step", "4", "--out", str(out)], tmp_path / "replay.txt")
    assert again.finish(JOB_S) == 0, again.text()[-4000:]
    assert "Step 4 from the start, 4 steps" in again.text()
    assert "Step 4 is the same to the bit" in again.text() and "digest of the critic's weights" in again.text()
    run = digests(tmp_path)
    assert list(run["critic"]) == [0, 1, 2, 3] and list(run["actor"]) == [1, 2, 3]
    assert digests(out) == run
    for name, steps in (("train/critic-value_loss", critic_steps), ("train/pg_loss", actor_steps)):
        undisturbed = {row["train/step"]: row[name] for row in records(out, name)}
        assert all(row[name] == undisturbed[row["train/step"]] for row in steps)
    again.seconds_until_gone(GONE_S)
