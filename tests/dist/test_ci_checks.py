"""``--ci-test`` on a real trainer: a healthy run passes, another run's gradients are recognised."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.utils.errors import CheckError
from tests.dist.trainer_case import cut, make_args, make_train_data, run_workers, start_worker, write_model

pytestmark = pytest.mark.dist


def check_real_runs(rank: int, world_size: int, port: int, hf: str, folder: str) -> None:
    template = f"{folder}/{{role}}_{{rollout_id}}_{{step_id}}.pt"
    flags = ("--actor-num-gpus-per-node", world_size, "--ci-test", "--use-kl-loss", "--kl-loss-coef", 0.1)
    flags += ("--ci-train-rollout-logprob-abs-diff-threshold", 100, "--global-batch-size", 4)  # two steps a rollout

    def train(seed: int, *more: object) -> None:
        args = make_args(Path(hf), *flags, *more)
        worker = start_worker(args, rank, world_size, port, with_ref=True)
        for rollout_id in range(2):
            worker.train(rollout_id, cut(args, make_train_data(seed=seed), worker.get_parallel_config())[0])

    train(0, "--ci-save-grad-norm", template)
    train(0, "--ci-load-grad-norm", template)
    with pytest.raises(CheckError, match="in the run that wrote"):
        train(1, "--ci-load-grad-norm", template)
    with pytest.raises(CheckError, match="threshold is 0.1"):
        train(0, "--ci-train-rollout-logprob-abs-diff-threshold", 0.1)


def test_the_checks_pass_a_healthy_run_and_stop_another(tmp_path):
    write_model(tmp_path / "hf")
    run_workers(check_real_runs, 1, str(tmp_path / "hf"), str(tmp_path), timeout_s=200)
