"""Real jobs on two CPU cores that are struck or cannot start, and a driver of the user's own that ends well.

Each has the parts that its test needs and no others: the tests run in this order.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from tests.e2e.job import GONE_S, JOB_S, STEP_S, Job, grpo_flags, records, replay_flags

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path; scripts/run-tiny-gpu.sh is the GPU's"),
]

ENDLESS = "--actor-num-gpus-per-node 1 --num-rollout 1000 --save-interval 1000".split()


@pytest.fixture(scope="module")
def generated(tmp_path_factory) -> Path:
    """The folder of the first job's rollouts."""
    return tmp_path_factory.mktemp("generated")


def generating_job(task: Path, folder: Path) -> Job:
    """Engines alone, in the middle of their work, with responses long enough to be caught generating."""
    more = "--rollout-num-gpus 1 --debug-rollout-only --rollout-max-response-len 400".split()
    job = Job("train.py", grpo_flags(task, folder, *ENDLESS, *more), folder / "log.txt")
    job.wait_until(lambda: (folder / "dump/1.pt").exists(), "second rollout", STEP_S)
    return job


def strike(job: Job, process: str, message: str) -> None:
    """SIGKILL to a part of the job; it ends with the cause, and leaves nothing."""
    victims = job.pids(process)
    assert victims, f"no {process} runs: {job.commands()}"
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    assert job.finish(GONE_S) == 1
    assert re.search("slime job failed: " + message, job.text(), re.DOTALL), job.text()[-3000:]
    job.seconds_until_gone(GONE_S)


def test_engines_alone_generate_without_a_trainer_until_one_dies(task, generated):
    job = generating_job(task, generated)
    strike(job, "slime.backends.sglang_utils.server_main", r"EngineDiedError: engine 0 .*killed by signal 9")
    assert "MegatronTrainRayActor" not in job.text()
    samples = torch.load(generated / "dump/0.pt", weights_only=False)["samples"]
    assert len(samples) == 16 and all(sample["response_length"] > 0 for sample in samples)


def test_a_dead_router_ends_the_job(task, tmp_path):
    job = generating_job(task, tmp_path)
    strike(job, "slime.backends.sglang_utils.router_main", r"EngineDiedError: the router http.* has ended")


def test_a_dead_trainer_ends_the_job(task, generated, tmp_path):
    dumps = str(generated / "dump/0.pt")  # the same one for every rollout
    job = Job("train.py", replay_flags(task, tmp_path, dumps, *ENDLESS), tmp_path / "log.txt")
    job.wait_until(lambda: "step 1/" in job.text(), "first step", STEP_S)
    strike(job, "ray::MegatronTrainRayActor", r"EngineDiedError: (actor rank 0 died|an actor died during training)")


def test_a_driver_of_the_users_own_trains_actor_and_critic(task, tmp_path):
    """Written against upstream's names alone, and run without this project's entry point."""
    flags = grpo_flags(
        task, tmp_path, *"--actor-num-gpus-per-node 1 --colocate --check-weight-update-equal".split(),
        *"--advantage-estimator ppo --num-critic-only-steps 1 --rollout-max-response-len 16".split(),
    )  # fmt: skip
    job = Job("tests/e2e/drivers/synchronous.py", flags, tmp_path / "log.txt")
    assert job.finish(JOB_S) == 0, job.text()[-4000:]
    steps = records(tmp_path, "train/pg_loss")
    assert [step["train/step"] for step in steps] == [2, 3]  # rollout 0 trains the critic alone
    assert steps[0]["train/train_rollout_logprob_abs_diff"] < 1e-4  # the engines have the trainer's weights
    assert [step["train/step"] for step in records(tmp_path, "train/critic-value_loss")] == [0, 1, 2, 3]
    for folder in (tmp_path, tmp_path / "critic"):
        assert (folder / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert (tmp_path / "rollout/global_dataset_state_dict_1.pt").exists()
    versions = {
        version
        for rollout_id in range(2)
        for sample in torch.load(tmp_path / f"dump/{rollout_id}.pt", weights_only=False)["samples"]
        for version in sample["weight_versions"]
    }
    assert versions == {"1", "2"}
    job.seconds_until_gone(GONE_S)


def test_a_cluster_that_is_too_small_is_an_error_not_a_wait(task, tmp_path):
    import ray

    ray.init(address="local", num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False)
    try:
        address = ray.get_runtime_context().gcs_address
        flags = grpo_flags(
            task, tmp_path, *"--actor-num-gpus-per-node 4 --colocate --cluster-wait-timeout-s 2".split()
        )
        job = Job("train.py", flags, tmp_path / "log.txt", RAY_ADDRESS=address)
        assert job.finish(STEP_S) == 2
        assert "the job needs 4 GPUs and 5 CPUs; the Ray cluster has 1 GPUs and 4 CPUs" in job.text()
    finally:
        ray.shutdown()
