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
import requests
import torch

from slime.utils.net import get_current_node_ip, get_free_port, is_loopback
from tests.e2e.job import GONE_S, JOB_S, REPO, STEP_S, Job, grpo_flags, records
from tests.e2e.stranger import check_a_stranger_gets_nothing

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


def test_a_run_that_others_reach_goes_on_where_that_one_stopped_and_tells_them_nothing_until_ctrl_c(
    task, run_folder, tmp_path
):
    """``SLIME_HOST_IP`` makes the job listen where other hosts reach it, as a job of several nodes does."""
    address, page_port, secret_file = get_current_node_ip(), get_free_port(29500), tmp_path / "secret"
    assert not is_loopback(address), "this host has no address but loopback, so that nobody else reaches it"
    flags = grpo_flags(
        task, run_folder, *"--actor-num-gpus-per-node 1 --colocate --check-weight-update-equal".split(),
        *f"--num-rollout 1000 --prometheus-port {page_port} --job-secret-file {secret_file}".split(),
    )  # fmt: skip
    job = Job("train.py", flags, run_folder / "log2.txt", SLIME_HOST_IP=address)
    job.wait_until(lambda: "step 4/1000" in job.text(), "second step after the resume", STEP_S)
    try:
        check_a_stranger_gets_nothing(job, run_folder, address, page_port, secret_file)
    except requests.ConnectionError as error:
        ended = job.finish(GONE_S)  # the job says why a server of it is gone
        pytest.fail(f"{error}; the job ended with {ended}:\n{job.text()[-3000:]}")
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
