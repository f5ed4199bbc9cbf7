"""A critic and its actor on several ranks: their results, assembled so that layouts can be compared."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from tests.dist.trainer_case import cut, make_args, make_train_data, start_worker

PPO = (
    *("--advantage-estimator", "ppo", "--gamma", "0.97", "--lambd", "0.9", "--normalize-advantages"),
    *("--kl-coef", "0.1", "--kl-loss-type", "k2", "--value-clip", "0.05"),
)

Values = dict[int, list[float]]
"""Position of a sample in the rollout -> its value at every response token."""


def start_critic(args: Namespace, rank: int, world_size: int, port: int) -> Any:
    """A critic with the critic's own args."""
    return start_worker(args.critic_args, rank, world_size, port, role="critic")


def my_share(args: Namespace, worker: Any) -> dict[str, Any]:
    """This rank's part of the rollout."""
    parallel = worker.get_parallel_config()
    return cut(args, make_train_data(), parallel)[parallel["dp_rank"]]


def whole_values(rank_data: Any, values: list[Any]) -> Values:
    """Values of this rank's samples, assembled from the context-parallel ranks' parts."""
    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp

    lengths = zip(rank_data.total_lengths, rank_data.response_lengths, strict=True)
    return {
        position: all_gather_with_cp(value, *length).tolist()
        for position, value, length in zip(rank_data.partition, values, lengths, strict=True)
    }


def run_ppo(rank: int, world_size: int, port: int, folder: str, variants: list[tuple[str, ...]]) -> list[Any]:
    """For each variant of flags: the critic's values and parameters, and the step of its actor."""
    from slime.backends.megatron_utils.update_weight.gather import iter_full_tensors

    results = []
    for number, variant in enumerate(variants):
        save = ("--save", f"{folder}/save{world_size}-{number}", "--save-interval", 1)
        args = make_args(Path(folder), "--actor-num-gpus-per-node", world_size, *PPO, *save, *variant)
        critic = start_critic(args, rank, world_size, port)
        rank_data = my_share(args, critic)
        first = critic.train(0, rank_data)
        critic.save_model(0)
        critic.publish_checkpoint(0)
        second = critic.train(1, rank_data)
        values = [whole_values(rank_data, out["values"]) for out in (first, second) if out is not None]
        parameters = {name: value.flatten().tolist() for name, value in iter_full_tensors(critic.model, dtype=None)}
        actor = start_worker(args, rank, world_size, port, with_ref=True)
        # The test's reference is the actor itself: move it, so that the KL in the reward is not 0.
        for tensor in actor.weights.get("ref").values():
            tensor.mul_(1.05)
        metrics = actor.train(0, rank_data, external_data=first)
        results.append((values, parameters, metrics))
    return results


def resume_critics(
    rank: int, world_size: int, port: int, folder: str, cases: list[tuple[str, tuple[str, ...]]]
) -> Any:
    """For each (folder of saves, flags): values and parameters of a critic that continues with rollout 1."""
    from slime.backends.megatron_utils.checkpoint import publish_checkpoint
    from slime.backends.megatron_utils.update_weight.gather import iter_full_tensors

    results = []
    for saves, variant in cases:
        root = Path(folder, saves)
        if rank == 0:  # the actor's tracker, without which no run resumes; its checkpoint is not read
            (root / "iter_0000000").mkdir(exist_ok=True)
            (root / "iter_0000000/metadata.json").touch()
            publish_checkpoint(root, 0)
        args = make_args(Path(folder), "--actor-num-gpus-per-node", world_size, *PPO, "--load", root, *variant)
        critic = start_critic(args, rank, world_size, port)
        rank_data = my_share(args, critic)
        out = critic.train(1, rank_data)
        values = whole_values(rank_data, out["values"]) if out is not None else {}
        parameters = {name: value.flatten().tolist() for name, value in iter_full_tensors(critic.model, dtype=None)}
        results.append((critic._start_rollout_id, values, parameters))
    return results
