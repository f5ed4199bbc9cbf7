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
    """``--rollout-data-postprocess-path``: record the data about to be trained."""
    names = ("log_probs", "teacher_log_probs", "teacher_top", "advantages", "opd_reverse_kl", "rewards")
    SEEN.append({name: rollout_data.get(name) for name in names})


def distil_both_ways(rank: int, world_size: int, port: int, one: str, other: str) -> None:
    """Each model is the other's teacher once; their log-probs swap places."""
    from tests.dist import test_megatron_teacher as module

    for layout in LAYOUTS.values():
        module.SEEN.clear()
        for student, teacher in ((one, other), (other, one)):
            flags = ("--actor-num-gpus-per-node", world_size, *layout, "--use-opd", "--opd-type", "megatron")
            flags += ("--opd-kl-coef", COEF, "--opd-teacher-load", teacher)
            flags += ("--rollout-data-postprocess-path", f"{module.__name__}.keep")
            args = make_args(Path(student), *flags)
            worker = start_worker(args, rank, world_size, port)
            parallel = worker.get_parallel_config()
            metrics = worker.train(0, cut(args, make_train_data(), parallel)[parallel["dp_rank"]])
            if metrics is not None:
                assert metrics["rollout/opd_reverse_kl"] != 0 and "perf/teacher_log_probs_time" in metrics
            second = worker.train(1, cut(args, make_train_data(), parallel)[parallel["dp_rank"]])
            if metrics is not None:
                # One step down the gradient of the reverse KL; the teacher itself does not change.
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


def distil_from_two(rank: int, world_size: int, port: int, student: str, one: str, other: str) -> int:
    """Samples alternate between two teachers, each queried alone before; return how many tokens were likely."""
    from tests.dist import test_megatron_teacher as module

    module.SEEN.clear()
    layout = ("--context-parallel-size", "2")
    names = [("one", "other")[position % 2] for position in range(len(make_train_data()["response_lengths"]))]
    several = ("--opd-teachers", f"one={one}", f"other={other}")
    runs: tuple[tuple[str, ...], ...] = (
        ("--opd-teacher-load", one),
        ("--opd-teacher-load", other),
        several,
        (*several, "--opd-top-k", "4"),
    )
    for teachers in runs:
        flags = ("--actor-num-gpus-per-node", world_size, *layout, "--use-opd", "--opd-type", "megatron", *teachers)
        flags += ("--opd-kl-coef", COEF, "--rollout-data-postprocess-path", f"{module.__name__}.keep")
        args = make_args(Path(student), *flags)
        worker = start_worker(args, rank, world_size, port)
        parallel = worker.get_parallel_config()
        data = make_train_data()
        data["teacher_names"] = names
        shard = cut(args, data, parallel)[parallel["dp_rank"]]
        module.SEEN.append({"names": shard.extra["teacher_names"], "tokens": shard.tokens})
        metrics = worker.train(0, shard)
    assert metrics is None or 0 < metrics["train/opd_loss"] < 10
    first, second, both, top = module.SEEN[1::2]
    num_in_top = 0
    for position, name in enumerate(module.SEEN[-2]["names"]):
        alone, not_asked = (first, second) if name == "one" else (second, first)
        mine = both["teacher_log_probs"][position]
        torch.testing.assert_close(mine, alone["teacher_log_probs"][position])
        assert not mine.numel() or not torch.equal(mine, not_asked["teacher_log_probs"][position])
        torch.testing.assert_close(both["advantages"][position], alone["advantages"][position])
        # The likeliest tokens are the same teacher's; the advantages no longer contain the distillation term.
        ids_RK, log_prob_RK = top["teacher_top"][position].unbind(1)
        assert ids_RK.shape == (len(mine), 4) and (log_prob_RK.exp().sum(-1) <= 1 + 1e-5).all()
        assert (log_prob_RK[:, :-1] >= log_prob_RK[:, 1:]).all()
        reward = torch.full_like(mine, float(top["rewards"][position]))
        torch.testing.assert_close(top["advantages"][position], reward)
        is_likeliest = mine > log_prob_RK[:, -1] + 1e-4
        num_in_top += int(is_likeliest.sum())
        for row in is_likeliest.nonzero()[:, 0].tolist():
            assert (log_prob_RK[row] - mine[row]).abs().min() < 1e-4
    return num_in_top


def test_each_sample_is_pulled_by_its_own_teacher(tmp_path):
    for seed, name in enumerate(("student", "one", "other")):
        write_model(tmp_path / name, "qwen3", seed=seed)
    folders = [str(tmp_path / name) for name in ("student", "one", "other")]
    assert sum(run_workers(distil_from_two, 2, *folders, timeout_s=250)) > 0
