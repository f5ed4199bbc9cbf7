"""A real job on two CPU cores, started by a driver of the user's own: actor and critic."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.job import GONE_S, JOB_S, Job, grpo_flags, records

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path; scripts/run-tiny-gpu.sh is the GPU's"),
]


def test_a_driver_of_the_users_own_trains_actor_and_critic(task, tmp_path):
    """Written against upstream's names alone, and run without this project's entry point."""
    flags = grpo_flags(
        task, tmp_path, *"--actor-num-gpus-per-node 1 --colocate --check-weight-update-equal".split(),
        *"--advantage-estimator ppo --num-critic-only-steps 1 --rollout-max-response-len 16".split(),
        *"--over-sampling-batch-size 4".split(),  # fewer than a rollout are kept: the second has new ones
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
