"""A trainer that sleeps between its verbs, on two ranks: it trains, saves and sends what one that never sleeps does."""

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
    "adapters on experts": ("qwen3_moe", ("--tensor-model-parallel-size", 2, "--sequence-parallel", "--lora-rank", 4)),
    "shared adapters": (
        "qwen3_moe",
        ("--tensor-model-parallel-size", 2, "--sequence-parallel", "--lora-rank", 4, "--lora-experts", "shared"),
    ),
    "a critic": ("qwen3", PPO),
}


def train(rank: int, world_size: int, port: int, model: str, flags: tuple[object, ...], sleeps: bool) -> list[Any]:
    """What three rollouts report, the tensors that a push would send after each, and the digest of the weights."""
    import torch

    from slime.backends.megatron_utils import memory
    from slime.backends.megatron_utils.parameters import weights_digest
    from slime.backends.megatron_utils.update_weight.gather import iter_hf_tensors

    memory.sleeps = lambda args: sleeps  # on a CPU no trainer does
    args = make_args(Path(model), "--actor-num-gpus-per-node", world_size, "--offload-train", *flags)
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
        assert worker._is_asleep
        assert all((tensor.untyped_storage().nbytes() == 0) == sleeps for tensor in weights)
        sent = {}
        if not is_critic:
            name = worker._hf_config["model_type"]
            host = worker._weights_to_send()
            tensors = iter_hf_tensors(own, worker.model, model_name=name, dtype=torch.float32, host_weights=host)
            sent = {name: float(tensor.double().square().sum()) for name, tensor in tensors}
            worker._policies.record_pushed()
        worker.wake_up()
        found.append((metrics, sent, weights_digest(worker.model)))
        worker.sleep()
    return found


def without_times(metrics: Any) -> Any:
    return {k: v for k, v in metrics.items() if not k.startswith("perf/")} if isinstance(metrics, dict) else metrics


@pytest.mark.parametrize("run", RUNS)
def test_a_trainer_that_sleeps_does_what_one_does_that_never_sleeps(tmp_path: Path, run: str) -> None:
    family, flags = RUNS[run]
    write_model(tmp_path, family)
    awake, asleep = (run_workers(train, 2, str(tmp_path), flags, sleeps) for sleeps in (False, True))
    for plain, slept in zip(awake, asleep, strict=True):
        assert len({digest for *_, digest in plain}) == 3
        for one, other in zip(plain, slept, strict=True):
            assert without_times(one[0]) == without_times(other[0])
            assert one[1:] == other[1:]
