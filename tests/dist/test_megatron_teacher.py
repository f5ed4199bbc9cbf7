"""On-policy distillation with the teacher in the trainer, on two context-parallel ranks and on two stages."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.trainer_case import cut, make_args, make_train_data, run_workers, start_worker, write_model

pytestmark = pytest.mark.dist

LAYOUTS = {
    "CP2": ("--context-parallel-size", "2"),
    "PP2": ("--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "1"),
}
COEF = 0.7
SEEN: list[dict[str, Any]] = []


def keep(args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """``--rollout-data-postprocess-path``: what the trainer is about to train on."""
    names = ("log_probs", "teacher_log_probs", "advantages", "opd_reverse_kl", "rewards")
    SEEN.append({name: rollout_data.get(name) for name in names})


def distil_both_ways(rank: int, world_size: int, port: int, one: str, other: str) -> None:
    """Each model is the other's teacher once; their log-probs change places."""
    from tests.dist import test_megatron_teacher as module

    for layout in LAYOUTS.values():
        module.SEEN.clear()
        for student, teacher in ((one, other), (other, one)):
            flags = ("--actor-num-gpus-per-node", world_size, *layout, "--use-opd", "--opd-type", "megatron")
            flags += ("--opd-kl-coef", COEF, "--opd-teacher-load", teacher)
            flags += ("--rollout-data-postprocess-path", f"{module.__name__}.keep")
            args = make_args(Path(student), *flags)
            worker = start_worker(args, rank, world_size, port, with_opd_teacher=True)
            parallel = worker.get_parallel_config()
            metrics = worker.train(0, cut(args, make_train_data(), parallel)[parallel["dp_rank"]])
            if metrics is not None:
                assert metrics["rollout/opd_reverse_kl"] != 0 and "perf/teacher_log_probs_time" in metrics
            second = worker.train(1, cut(args, make_train_data(), parallel)[parallel["dp_rank"]])
            if metrics is not None:
                # One step down the gradient of the reverse KL; the teacher itself stays as it was.
                assert second["rollout/teacher_log_probs"] == pytest.approx(metrics["rollout/teacher_log_probs"])
                assert second["rollout/log_probs"] != metrics["rollout/log_probs"]
        first, _, swapped, _ = module.SEEN
        if first["log_probs"] is None:
            continue  # an earlier pipeline stage
        for mine, others in ((first, swapped), (swapped, first)):
            for position, reward in enumerate(mine["rewards"]):
                teacher_R, student_R = mine["teacher_log_probs"][position], mine["log_probs"][position]
                torch.testing.assert_close(teacher_R, others["log_probs"][position], atol=1e-5, rtol=1e-5)
                expected = float(reward) - COEF * (student_R.double() - teacher_R.double())
                torch.testing.assert_close(mine["advantages"][position].double(), expected, atol=1e-5, rtol=1e-5)


def test_the_teachers_log_probs_pull_the_advantages(tmp_path):
    write_model(tmp_path / "one", "qwen3", seed=0)
    write_model(tmp_path / "other", "qwen3", seed=5)
    run_workers(distil_both_ways, 2, str(tmp_path / "one"), str(tmp_path / "other"), timeout_s=250)
