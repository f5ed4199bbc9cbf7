"""The real job on two CPU cores: Ray, Megatron, SGLang and its router, started by the real entry points.

A random model and random rewards: what is tested is that every part works with the others, not that it learns.  One
job and what follows from it: each test goes on with the one before, and they run in this order.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from slime.observability.run_reader import read_run
from tests.e2e.job import GONE_S, JOB_S, REPO, STEP_S, Job, grpo_flags, records, replay_flags

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path; scripts/run-tiny-gpu.sh is the GPU's"),
]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run")


def test_a_colocated_run_whose_trainer_ends_with_every_push_trains_saves_and_exports(task, run_folder):
    """After each push, over disk, the trainer goes on from its checkpoint."""
    eval_file = task / "eval32.jsonl"
    eval_file.write_text("".join((task / "task/data/eval.jsonl").read_text().splitlines(keepends=True)[:32]))
    flags = grpo_flags(
        task, run_folder, *"--actor-num-gpus-per-node 1 --colocate --release-train".split(),
        *"--update-weight-transport disk --check-weight-update-equal".split(),
        *("--update-weight-disk-dir", str(run_folder / "shared")),
        *f"--eval-interval 1 --eval-prompt-data held_out {eval_file} --eval-temperature 0.7".split(),
        *f"--save-hf {run_folder}/hf/{{rollout_id}} --use-tensorboard --use-wandb --wandb-mode offline".split(),
        *f"--wandb-dir {run_folder} --wandb-project tiny --wandb-group tiny".split(),
    )  # fmt: skip
    job = Job("train.py", flags, run_folder / "log.txt", TENSORBOARD_DIR=str(run_folder / "tensorboard"))
    assert job.finish(JOB_S) == 0, job.text()[-4000:]
    assert "step 2/2" in job.text()
    job.seconds_until_gone(GONE_S)
    assert (run_folder / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert [path.name for path in (run_folder / "shared").iterdir()] == ["weight_v000003"]
    steps = records(run_folder, "train/step")
    assert [step["train/step"] for step in steps] == [0, 1, 2, 3]  # two optimizer steps a rollout
    assert all(0 < step["train/grad_norm"] < 100 for step in steps)
    differences = [record["train/train_rollout_logprob_abs_diff"] for record in steps]
    assert differences[0] < 1e-4  # fp32 on both sides; later rollouts hold groups that older weights finished
    assert len(records(run_folder, "eval/held_out")) == 3  # before training and after each rollout
    answers = {path.stem: pq.read_metadata(path).num_rows for path in (run_folder / "samples").glob("eval_*")}
    assert answers == {"eval_start": 32, "eval_000000": 32, "eval_000001": 32}
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(run_folder / "hf/1")
    started = AutoModelForCausalLM.from_pretrained(task / "task/hf")
    assert not torch.equal(exported.lm_head.weight, started.lm_head.weight)
    assert list((run_folder / "tensorboard").rglob("events.*")) and list(run_folder.rglob("run-*.wandb"))


def test_a_run_whose_trainer_stays_goes_on_where_that_one_stopped_until_ctrl_c(task, run_folder):
    more = "--actor-num-gpus-per-node 1 --colocate --check-weight-update-equal --num-rollout 1000".split()
    flags = grpo_flags(task, run_folder, *more)
    job = Job("train.py", flags, run_folder / "log2.txt")
    job.wait_until(lambda: "step 4/1000" in job.text(), "second step after the resume", STEP_S)
    job.process.send_signal(signal.SIGINT)
    assert job.finish(GONE_S) == 130
    job.seconds_until_gone(GONE_S)
    shown = re.findall(r"^step (\d+)/1000", job.text(), flags=re.MULTILINE)
    assert shown[:2] == ["3", "4"]
    assert [record["train/step"] for record in records(run_folder, "train/step")][:6] == [0, 1, 2, 3, 4, 5]
    trained: list[int] = []
    for rollout_id in range(3):
        samples = torch.load(run_folder / f"dump/{rollout_id}.pt", weights_only=False)["samples"]
        trained += sorted({sample["group_index"] for sample in samples})
    assert len(trained) == len(set(trained)) == 12  # no group twice over the resume


def test_a_step_of_that_run_is_taken_again_to_the_bit(run_folder):
    """From the checkpoint before it and the recorded samples, in one process without Ray."""
    words = [sys.executable, "-m", "slime", "replay", str(run_folder), "--step", "3"]
    ended = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=JOB_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]
    assert "Step 3 is the same to the bit" in ended.stdout


def test_ppo_trains_its_critic_first_and_deaths_of_either_take_both_back_and_change_no_bit(task, run_folder, tmp_path):
    """On the recorded rollouts; the engines' part is tested above.  A replay in which nothing dies is the measure.

    The critic dies before both have trained on a rollout and before a checkpoint, so that both go back to the start;
    the actor dies later, and both go back to the copies in memory; and once more with those copies, and both go back
    to the checkpoint.
    """
    roles = tmp_path / "roles.yaml"
    roles.write_text("megatron:\n  - {name: values, role: critic, overrides: {lr: 1e-3}}\n")
    hook = "tests.e2e.dying_trainer.the_critic_dies_in_rollout_1_and_the_actor_in_2_and_with_the_copies_in_3"
    flags = replay_flags(
        task, tmp_path, f"{run_folder}/dump/{{rollout_id}}.pt",
        *"--actor-num-gpus-per-node 1 --advantage-estimator ppo --num-critic-only-steps 1 --num-rollout 4".split(),
        *("--megatron-config-path", str(roles), "--trainer-recovery", "memory", "--save-interval", "2"),
        *("--custom-megatron-before-train-step-hook-path", hook),
    )  # fmt: skip
    (tmp_path / "critic").mkdir()  # for the mark that it has died, before its first checkpoint
    job = Job("train.py", flags, tmp_path / "log.txt")
    assert job.finish(JOB_S) == 0, job.text()[-4000:]
    assert re.findall(r"(\w+) rank 0 died", job.text())[:3] == ["critic", "actor", "actor"]
    went_on = re.findall(r"went on from rollout (\d+) and trained again on (\d+) rollouts", job.text())
    assert went_on == [("0", "1"), ("2", "0"), ("2", "1")]  # from the start, from the copies, from the checkpoint
    assert re.findall(r"goes on from the copies in memory after rollout (\d+)", job.text()) == ["1", "1"]
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
    run, replayed = read_run(tmp_path), read_run(out)
    assert list(run.critic_digests) == [0, 1, 2, 3] and list(run.digests) == [1, 2, 3]
    assert (replayed.digests, replayed.critic_digests) == (run.digests, run.critic_digests)
    for name, steps in (("train/critic-value_loss", critic_steps), ("train/pg_loss", actor_steps)):
        undisturbed = {row["train/step"]: row[name] for row in records(out, name)}
        assert all(row[name] == undisturbed[row["train/step"]] for row in steps)
    again.seconds_until_gone(GONE_S)
