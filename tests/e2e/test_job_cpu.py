"""The real job on two CPU cores: Ray, Megatron, SGLang and its router, started by the real entry points.

A random GLM-4 and random rewards: this tests that all parts work together, not that the model learns.  There is one
job, and each test continues from the previous one, in this order.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import requests
import torch

from slime.utils.net import get_current_node_ip, get_free_port, is_loopback
from tests.e2e.job import GONE_S, JOB_S, REPO, STEP_S, Job, grpo_flags, records
from tests.e2e.stranger import check_a_stranger_gets_nothing
from tests.seeds.jobs import prepare, run_job
from tests.seeds.outcome import problems, read
from tests.seeds.recipes import GLM4
from tests.seeds.recipes import Job as RecipeJob

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path; scripts/run-tiny-gpu.sh is the GPU's"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("base")


@pytest.fixture(scope="module")
def run_folder(base) -> Path:
    return base / "run"


def test_the_recipe_of_glm4_9b_trains_actor_and_critic_pushes_changes_over_disk_saves_and_exports(base, run_folder):
    prepare(GLM4, GLM4.cpu, base, torch.float32, num_gpus=2)
    flags = f"""
        --rollout-num-gpus 1 --actor-num-gpus-per-node 1 --tensor-model-parallel-size 1
        --context-parallel-size 1 --rollout-batch-size 4 --n-samples-per-prompt 4 --over-sampling-batch-size 6
        --num-steps-per-rollout 2 --advantage-estimator ppo --num-critic-only-steps 1
        --update-weight-mode delta --update-weight-transport disk --update-weight-disk-dir {run_folder}/shared
        --update-weight-disk-keep-files --update-weight-local-checkpoint-dir {run_folder}/local
        --save-hf {run_folder}/hf/{{{{rollout_id}}}} --use-tensorboard
        --use-wandb --wandb-mode offline --wandb-dir {run_folder} --wandb-project tiny --wandb-group tiny
    """
    form = replace(GLM4.cpu, environment={"TENSORBOARD_DIR": str(run_folder / "tensorboard")})
    job = RecipeJob("an engine apart", flags, bound=1e-2)
    log = run_job(GLM4, form, job, base, run_folder, 2, JOB_S)
    assert problems(replace(job, num_rollouts=1), read(run_folder, log, 0, 0), 1) == []
    steps = records(run_folder, "train/pg_loss")
    assert [step["train/step"] for step in steps] == [2, 3]  # rollout 0 trains only the critic
    assert all(0 < step["train/grad_norm"] < 100 for step in steps)
    assert steps[0]["train/train_rollout_logprob_abs_diff"] < 1e-4  # fp32 on both sides
    assert sorted(path.name for path in (run_folder / "shared").iterdir()) == [f"weight_v00000{n}" for n in (1, 2, 3)]
    state = json.loads((run_folder / "local/.weight_sync/state.json").read_text())
    assert (state["version"], state["dirty"]) == ("000003", "")
    (push,) = records(run_folder, "perf/update_weights_density")  # of rollout 1; rollout 0 changed no weight
    assert 0 < push["perf/update_weights_density"] <= 1
    assert (run_folder / "critic/latest_checkpointed_iteration.txt").read_text() == "1"
    answers = {path.stem: pq.read_metadata(path).num_rows for path in (run_folder / "samples").glob("eval_*")}
    assert answers == {"eval_start": 8, "eval_000000": 8, "eval_000001": 8}  # before training, after each rollout
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(run_folder / "hf/1")
    started = AutoModelForCausalLM.from_pretrained(base / GLM4.folder)
    assert not torch.equal(exported.lm_head.weight, started.lm_head.weight)
    assert list((run_folder / "tensorboard").rglob("events.*")) and list(run_folder.rglob("run-*.wandb"))


def test_a_run_that_others_reach_goes_on_where_that_one_stopped_and_tells_them_nothing_until_ctrl_c(
    base, run_folder, tmp_path
):
    """``SLIME_HOST_IP`` makes the job listen where other hosts reach it, as a multi-node job does."""
    address, page_port, secret_file = get_current_node_ip(), get_free_port(29500), tmp_path / "secret"
    assert not is_loopback(address), "this host has no address but loopback, so that nobody else reaches it"
    flags = grpo_flags(
        base, run_folder, *"--actor-num-gpus-per-node 1 --colocate --check-weight-update-equal".split(),
        *f"--hf-checkpoint {base}/{GLM4.folder} --ref-load {base}/{GLM4.folder}_torch_dist".split(),
        *f"--prompt-data {base}/dapo-math-17k/dapo-math-17k.jsonl".split(),
        *"--advantage-estimator ppo --num-critic-only-steps 1".split(),
        *f"--num-rollout 1000 --prometheus-port {page_port} --job-secret-file {secret_file}".split(),
    )  # fmt: skip
    job = Job("train.py", flags, run_folder / "log2.txt", SLIME_HOST_IP=address)
    job.wait_until(lambda: "step 4/1000" in job.text(), "second step after the resume", STEP_S)
    try:
        check_a_stranger_gets_nothing(job, run_folder, address, page_port, secret_file)
    except requests.ConnectionError as error:
        ended = job.finish(GONE_S)  # the job says why its server is gone
        pytest.fail(f"{error}; the job ended with {ended}:\n{job.text()[-3000:]}")
    job.process.send_signal(signal.SIGINT)
    assert job.finish(GONE_S) == 130
    job.seconds_until_gone(GONE_S)
    shown = re.findall(r"^step (\d+)/1000", job.text(), flags=re.MULTILINE)
    assert shown[:2] == ["3", "4"]
    assert [row["train/step"] for row in records(run_folder, "train/pg_loss")][:4] == [2, 3, 4, 5]
    assert [row["train/step"] for row in records(run_folder, "train/critic-value_loss")][:6] == [0, 1, 2, 3, 4, 5]
    trained: list[int] = []
    for rollout_id in range(3):
        samples = torch.load(run_folder / f"dump/{rollout_id}.pt", weights_only=False)["samples"]
        trained += sorted({sample["group_index"] for sample in samples})
    assert len(trained) == len(set(trained)) == 12  # no group twice across the resume


def test_a_step_of_that_run_is_taken_again_to_the_bit(run_folder):
    """From the previous checkpoint and the recorded samples, in one process without Ray."""
    words = [sys.executable, "-m", "slime", "replay", str(run_folder), "--step", "3"]
    ended = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=JOB_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]
    assert "Step 3 is the same to the bit" in ended.stdout
