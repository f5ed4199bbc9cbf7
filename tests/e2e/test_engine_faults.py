"""Engines and routers that die during a real rollout, with ``--use-fault-tolerance``: the job continues."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.e2e.job import Job, grpo_flags, records

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.faults,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path"),
]

# A dead process is noticed at once; the timeout is for hanging ones, and must be long enough for a busy machine.
TOLERANT = "--use-fault-tolerance --rollout-health-check-interval 5 --rollout-health-check-timeout 120"
PROCESS = {"engine": "sglang_utils.server_main", "router": "sglang_utils.router_main"}


def busy_job(task: Path, folder: Path, layout: str = "--rollout-num-gpus 1") -> Job:
    """A job that is generating its second rollout; its responses take some seconds.

    Nothing carries over between rollouts, so that all samples of a rollout come from the same weights.
    """
    flags = grpo_flags(
        task, folder, *"--actor-num-gpus-per-node 1 --num-rollout 3".split(), *layout.split(), *TOLERANT.split(),
        *"--rollout-max-response-len 400 --max-tokens-per-gpu 2048 --check-weight-update-equal".split(),
    )  # fmt: skip
    flags.remove("--partial-rollout")
    job = Job("train.py", flags, folder / "log.txt")
    job.wait_until(lambda: "step 1/3" in job.text(), "first step", 240)
    return job


def kill(job: Job, what: str) -> None:
    pids = job.pids(PROCESS[what])
    assert pids, f"no {what} runs"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("layout", ["--rollout-num-gpus 1", "--colocate"], ids=["apart", "colocated"])
def test_the_only_engine_is_killed_and_the_job_trains_on_with_another(task, tmp_path, layout):
    job = busy_job(task, tmp_path, layout)
    kill(job, "engine")
    killed_s = time.monotonic()
    job.wait_until(lambda: "is evicted now" in job.text(), "detection", 30)
    print(f"detected after {time.monotonic() - killed_s:.1f} s")
    job.wait_until(lambda: "is back at" in job.text(), "replacement", 300)
    print(f"serving again after {time.monotonic() - killed_s:.1f} s")
    assert job.finish(200) == 0, job.text()[-4000:]
    assert "step 3/3" in job.text()
    steps = records(tmp_path, "train/step")
    assert len(steps) == 6
    # The replacement started with the weights on disk; it sampled with the last pushed ones.
    pushed = re.findall(r"Pushed weight version (\d) .*Every engine's weights equal the trainer's", job.text())
    assert sorted(pushed) == ["1", "2", "2", "3", "4"]
    differences = [step["train/train_rollout_logprob_abs_diff"] for step in steps]
    print(f"log-probs of trainer and engine differ by {max(differences):.2g}")
    assert max(differences) < 1e-3
    job.seconds_until_gone(30)


def test_the_router_is_killed_and_the_job_goes_on_with_another(task, tmp_path):
    job = busy_job(task, tmp_path)
    kill(job, "router")
    job.wait_until(lambda: "restarting it" in job.text(), "detection", 30)
    assert job.finish(200) == 0, job.text()[-4000:]
    assert "step 3/3" in job.text()
