"""A trainer that sleeps between its verbs, on two ranks, gives the same results as one that never sleeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.trainer_case import cut, make_args, make_train_data, run_workers, start_worker, write_model

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

REFERENCE = ("--use-kl-loss", "--kl-loss-coef", 0.05, "--ref-update-interval", 2, "--keep-old-actor")
PPO = ("--advantage-estimator", "ppo", "--normalize-advantages")
RUNS: dict[str, tuple[str, tuple[object, ...]]] = {
    "a reference and an old actor": ("qwen3", (*REFERENCE, "--bf16")),
    "experts over two ranks": ("qwen3_moe", ("--expert-model-parallel-size", 2)),
    "a critic": ("qwen3", PPO),
}


ROOM = {0: (True, True, True, True), 1: (True, False, True, False)}
"""Free memory for the engines on each rank's GPU, at the start and after each rollout."""


def train(
    rank: int, world_size: int, port: int, model: str, flags: tuple[object, ...], sleeps: bool, if_needed: bool = False
) -> list[Any]:
    """The reports of three rollouts, the tensors that a push would send after each, and the weights digest."""
    import torch

    from slime.backends.megatron_utils import memory
    from slime.backends.megatron_utils.parameters import weights_digest
    from slime.backends.megatron_utils.megatron_to_hf import hf_form
    from slime.backends.megatron_utils.update_weight.gather import iter_hf_tensors

    memory.sleeps = lambda offload_train: sleeps  # on a CPU no trainer does
    args = make_args(Path(model), "--actor-num-gpus-per-node", world_size, "--offload-train", *flags)
    args.offload_train_if_needed, args.sglang_mem_fraction_static = if_needed, 0.5
    total = 100 * 2**30
    need = total // 2 + memory.ENGINE_WORK_BYTES
    free = iter([need if has_room else need - 2**20 for has_room in ROOM[rank]])
    torch.cuda.mem_get_info = lambda *_: (next(free), total)
    is_critic = args.use_critic
    role, own = ("critic", args.critic_args) if is_critic else ("actor", args)
    worker = start_worker(own, rank, world_size, port, role=role, with_ref="--use-kl-loss" in flags)
    parallel = worker.get_parallel_config()
    share = cut(own, make_train_data(), parallel)[parallel["dp_rank"]]
    found: list[Any] = []
    for rollout_id in range(3):
        metrics = worker.train(rollout_id, share)
        if is_critic:
            metrics = [value.tolist() for value in metrics["values"]]
        weights = [*worker.model[0].parameters()]
        stays = if_needed and all(room[1 + rollout_id] for room in ROOM.values())
        assert worker._sleep.is_asleep != stays
        assert all((tensor.untyped_storage().nbytes() == 0) == (sleeps and not stays) for tensor in weights)
        sent = {}
        if not is_critic:
            name = worker._hf_config["model_type"]
            host = worker._sleep.host_weights()
            tensors = iter_hf_tensors(hf_form(own, name), worker.model, dtype=torch.float32, host_weights=host)
            sent = {name: float(tensor.double().square().sum()) for name, tensor in tensors}
            worker._policies.record_pushed()
        worker.wake_up()
        found.append((metrics, sent, weights_digest(worker.model)))
        if not if_needed:
            worker.sleep()
    return found


def without_times(metrics: Any) -> Any:
    return {k: v for k, v in metrics.items() if not k.startswith("perf/")} if isinstance(metrics, dict) else metrics


@pytest.mark.parametrize("run", RUNS)
def test_a_trainer_that_sleeps_does_what_one_does_that_never_sleeps(tmp_path: Path, run: str) -> None:
    check_sleep(tmp_path, *RUNS[run])


def check_sleep(tmp_path: Path, family: str, flags: tuple[object, ...]) -> None:
    write_model(tmp_path, family)
    awake, asleep = (run_workers(train, 2, str(tmp_path), flags, sleeps) for sleeps in (False, True))
    for plain, slept in zip(awake, asleep, strict=True):
        assert len({digest for *_, digest in plain}) == 3
        for one, other in zip(plain, slept, strict=True):
            assert without_times(one[0]) == without_times(other[0])
            assert one[1:] == other[1:]


def test_a_trainer_sleeps_only_where_the_engines_have_no_room_beside_it_on_one_card(tmp_path: Path) -> None:
    family, flags = RUNS["experts over two ranks"]
    write_model(tmp_path, family)
    awake = run_workers(train, 2, str(tmp_path), flags, False)
    for plain, slept in zip(awake, run_workers(train, 2, str(tmp_path), flags, True, True), strict=True):
        assert [without_times(one[0]) for one in plain] == [without_times(one[0]) for one in slept]
        assert [one[1:] for one in plain] == [one[1:] for one in slept]
