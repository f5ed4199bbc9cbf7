"""A critic and the actor that it serves, on several ranks: what they compute, put together so that layouts compare."""

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
    """Values of this rank's samples, put together from the parts of the context-parallel ranks."""
    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp

    lengths = zip(rank_data.total_lengths, rank_data.response_lengths, strict=True)
    return {
        position: all_gather_with_cp(value, *length).tolist()
        for position, value, length in zip(rank_data.partition, values, lengths, strict=True)
    }


def value_gradients(args: Namespace, rank_data: Any) -> dict[str, list[float]]:
    """Gradient of the value loss for every parameter, whole, by global name.

    The old values are shifted by a random amount per token, so that some are clipped.
    """
    import torch
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import unwrap_model

    from slime.backends.megatron_utils.advantages import compute_advantages_and_returns
    from slime.backends.megatron_utils.checkpoint import load_checkpoint
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp
    from slime.backends.megatron_utils.data import get_data_iterator, prepare_rollout_data
    from slime.backends.megatron_utils.forward import forward_only
    from slime.backends.megatron_utils.log_probs import get_values
    from slime.backends.megatron_utils.model import build_model
    from slime.backends.megatron_utils.parameters import iter_shards
    from slime.backends.megatron_utils.train_step import accumulate_gradients
    from slime.backends.megatron_utils.update_weight.gather import gather_tensor_parallel

    model = build_model(Namespace(**{**vars(args), "use_distributed_optimizer": False}), "critic")
    load_checkpoint(args, model)
    unwrap_model(model[0]).config.finalize_model_grads_func = finalize_model_grads
    data = prepare_rollout_data(rank_data)
    iterators = get_data_iterator(data, 1)
    data.update(forward_only(get_values, args, model, iterators, data["num_microbatches"]))
    if "values" in data:
        noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(5))
        data["values"] = [
            value + 0.1 * slice_log_prob_with_cp(noise[position, :response], total, response)
            for value, position, total, response in zip(
                data["values"], data["partition"], data["total_lengths"], data["response_lengths"], strict=True
            )
        ]
    compute_advantages_and_returns(args, data)
    iterators[0].reset()
    for chunk in model:
        chunk.zero_grad_buffer()
        chunk.train()
    accumulate_gradients(
        args, "test", iterators, model, data["num_microbatches"][0], data["global_batch_sizes"][0],
        loss_type="value_loss",
    )  # fmt: skip
    return {
        shard.name: gather_tensor_parallel(shard, shard.parameter.main_grad, is_gated=True).flatten().tolist()
        for shard in iter_shards(model)
    }


def run_ppo(rank: int, world_size: int, port: int, folder: str, variants: list[tuple[str, ...]]) -> list[Any]:
    """For each variant of flags: the critic's values, gradients and parameters, and the step of its actor."""
    from slime.backends.megatron_utils.train_metrics import is_main_rank
    from slime.backends.megatron_utils.update_weight.gather import iter_full_tensors

    results = []
    for number, variant in enumerate(variants):
        save = ("--save", f"{folder}/save{world_size}-{number}", "--save-interval", 1)
        args = make_args(Path(folder), "--actor-num-gpus-per-node", world_size, *PPO, *save, *variant)
        critic = start_critic(args, rank, world_size, port)
        rank_data = my_share(args, critic)
        gradients = value_gradients(args.critic_args, rank_data)
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
        results.append((values, gradients if is_main_rank() else None, parameters, metrics))
    return results


def resume_critics(
    rank: int, world_size: int, port: int, folder: str, cases: list[tuple[str, tuple[str, ...]]]
) -> Any:
    """For each (folder of saves, flags): values and parameters of a critic that goes on with rollout 1."""
    from slime.backends.megatron_utils.checkpoint import publish_checkpoint
    from slime.backends.megatron_utils.update_weight.gather import iter_full_tensors

    results = []
    for saves, variant in cases:
        root = Path(folder, saves)
        if rank == 0:  # the actor's tracker, without which no run resumes; its checkpoint is not looked at
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
