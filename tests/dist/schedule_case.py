"""A trainer on every rank of a pool, followed over several rollouts: its weights and policies after each."""

from __future__ import annotations

from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils.data import get_data_iterator, prepare_rollout_data
from slime.backends.megatron_utils.forward import forward_only
from slime.backends.megatron_utils.log_probs import get_log_probs_and_entropy
from slime.utils.distributed_utils import init_gloo_group
from slime.weights.push.state import PushReport
from tests.dist.trainer_case import cut, make_args, make_train_data, start_worker

_NOTED: list[list[Tensor]] = []


def note_log_probs(args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """``--rollout-data-postprocess-path``: record the old policy's log-probs of the rollout."""
    _NOTED.append([log_prob.clone() for log_prob in rollout_data["log_probs"]])


class NoEngines:
    """An updater without engines."""

    def push(self) -> PushReport:
        """Do nothing."""
        return PushReport(1, 0, 0, 0, 0.0)

    def record_weights_changed(self) -> None:
        """Do nothing."""


def follow(folder: str, flags: tuple[object, ...], num_rollouts: int) -> dict[str, Any]:
    """Train some rollouts, with pushes according to ``--update-weights-interval``.

    Returns:
        ``weights``: this rank's by name, before the first rollout and after each; ``metrics`` of each rollout;
        ``noted``: old log-probs that each rollout trained with; ``computed``: log-probs of the same samples under each
        entry of ``weights``; ``ref``: the reference after each rollout; ``state_bytes`` of the optimizer, without
        master weights.
    """
    args = make_args(Path(folder), "--actor-num-gpus-per-node", dist.get_world_size(), *flags)
    init_gloo_group(timeout=timedelta(minutes=1))
    worker = start_worker(args, dist.get_rank(), dist.get_world_size(), 0, with_ref=args.use_kl_loss)
    worker._updater = NoEngines()
    worker.update_weights()
    parallel = worker.get_parallel_config()
    rank_data = cut(args, make_train_data(), parallel)[parallel["dp_rank"]]
    _NOTED.clear()
    weights, metrics, ref = [snapshot(worker)], [], []
    for rollout_id in range(num_rollouts):
        metrics.append(worker.train(rollout_id, rank_data))
        if (rollout_id + 1) % args.update_weights_interval == 0:
            worker.update_weights()
        weights.append(snapshot(worker))
        if "ref" in worker.weights.tags:
            ref.append({name: tensor.clone() for name, tensor in worker.weights.get("ref").items()})
    return {
        "weights": weights,
        "metrics": metrics,
        "noted": list(_NOTED),
        "computed": [log_probs_under(worker, rank_data, copy) for copy in weights] if _NOTED else [],
        "ref": ref,
        "state_bytes": optimizer_bytes(worker.optimizer),
    }


def snapshot(worker: Any) -> dict[str, Tensor]:
    """Copies of the model's weights."""
    worker.weights.backup("seen")
    return {name: tensor.clone() for name, tensor in worker.weights.get("seen").items()}


def log_probs_under(worker: Any, rank_data: Any, weights: dict[str, Tensor]) -> list[Tensor]:
    """Log-probs of this rank's samples under other weights."""
    for name, tensor in worker.weights.get("seen").items():
        tensor.copy_(weights[name])
    worker.weights.active = ""
    worker.weights.switch_to("seen")
    data = prepare_rollout_data(rank_data)
    iterators = get_data_iterator(data, 1)
    result = forward_only(get_log_probs_and_entropy, worker.args, worker.model, iterators, data["num_microbatches"])
    return result["log_probs"]


def optimizer_bytes(optimizer: Any) -> int:
    """Bytes of all tensors in the state of the torch optimizers."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    states = [state for part in parts if part.optimizer for state in part.optimizer.state.values()]
    return sum(
        value.numel() * value.element_size()
        for state in states
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
