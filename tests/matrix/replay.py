"""Passes that record and replay experts, through the trainer's own data path, and their results on each rank.

Imported by the ranks of a pool, so all that they need is imported here at the top.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.backends.megatron_utils import initialize
from slime.backends.megatron_utils.cp_utils import packing_of
from slime.backends.megatron_utils.data import DataIterator, get_data_iterator
from slime.backends.megatron_utils.forward import forward_only
from slime.backends.megatron_utils.log_probs import get_log_probs_and_entropy
from slime.backends.megatron_utils.routing_replay import RoutingReplay
from slime.backends.megatron_utils.train_step import accumulate_gradients
from slime.utils.types import RolloutBatch
from tests.matrix import trainer
from tests.matrix.batch import make_train_data
from tests.matrix.case import FamilyCase, load_cases
from tests.matrix.comparisons import gradient_errors
from tests.matrix.layout_rank import whole_log_probs

Chunks = Sequence[torch.nn.Module]


def routed_train_data(case: FamilyCase) -> dict[str, Any]:
    """The matrix's ragged samples, with random experts in every layer for every token except the last."""
    config = case.config
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    num_experts = next(config[name] for name in names if name in config)
    shape = (config["num_hidden_layers"], num_experts)
    data = make_train_data(case.vocab_size, add_images=case.add_images)
    generator = torch.Generator().manual_seed(9)
    data["rollout_routed_experts"] = [
        torch.rand(len(tokens) - 1, *shape, generator=generator).topk(config["num_experts_per_tok"]).indices.int()
        for tokens in data["tokens"]
    ]
    return data


def replay_of(args: Namespace, model: Chunks) -> RoutingReplay:
    """The replay that the flags select."""
    return RoutingReplay(model, packing_of(args), from_engine=args.use_rollout_routing_replay)


def iterators_of(replay: RoutingReplay, data: RolloutBatch, num_chunks: int) -> list[DataIterator]:
    """One iterator for each chunk, which lets the micro-batches instruct the routers."""
    iterators = get_data_iterator(data, num_chunks)
    for iterator in iterators:
        iterator.attach = replay.attach
    return iterators


def old_log_probs(args: Namespace, model: Chunks, data: RolloutBatch, replay: RoutingReplay) -> list[Tensor]:
    """The pass over the old policy, which records or replays."""
    with replay.during("old_log_probs"):
        iterators = iterators_of(replay, data, len(model))
        result = forward_only(get_log_probs_and_entropy, args, model, iterators, data["num_microbatches"])
    return result.get("log_probs", [])


def replayed_backward(
    args: Namespace, model: Chunks, data: RolloutBatch, replay: RoutingReplay
) -> list[dict[str, Any]]:
    """Gradients of one whole step in the chunks' buffers; return the micro-batches' reports."""
    for chunk in model:
        chunk.zero_grad_buffer()
        chunk.train()
    with replay.during("train"):
        return accumulate_gradients(
            args,
            "replay",
            iterators_of(replay, data, len(model)),
            model,
            data["num_microbatches"][0],
            data["global_batch_sizes"][0],
            loss_type=args.loss_type,
        )


@torch.no_grad()
def turn_routers_round(model: Chunks) -> None:
    """Invert the weights of every router, so that it would choose the experts with the lowest scores."""
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if name.endswith("router.weight"):
                parameter.neg_()


def measure(case: FamilyCase, source: Path, flags: Sequence[object]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients and log-probs under the engine's experts, then under recorded ones with other routers."""
    args = trainer.make_args(case, source, "--use-rollout-routing-replay", *flags, world_size=dist.get_world_size())
    initialize.init(args)
    model = trainer.load_model(args)
    data = trainer.prepare(args, routed_train_data(case))
    tensors: dict[str, Tensor] = {}
    metrics: dict[str, float] = {}
    for kind in ("engine", "record"):
        own = Namespace(**{**vars(args), "use_rollout_routing_replay": kind == "engine"})
        replay = replay_of(own, model)
        replay.begin(data)
        log_probs = whole_log_probs(data, old_log_probs(own, model, data, replay))
        if mpu.is_pipeline_last_stage():
            tensors[f"{kind}/log-probs"] = log_probs
        if kind == "record":
            turn_routers_round(model)
        replayed_backward(own, model, data, replay)
        metrics[kind] = replay.take_metrics()["routing_replay_changed"]
        gradients = trainer.model_gradients(own, model)
        tensors |= {f"{kind}/{name}": gradient for name, gradient in gradients.items()}
        replay.clear()
    return tensors, metrics


# On the ranks: a case is looked up by name there, because its functions cannot be pickled


def write_reference(name: str, config: Mapping[str, Any], folder: str) -> dict[str, float]:
    """Write the checkpoint and a single process's results; return the share of choices that changed."""
    case = dataclasses.replace(load_cases([name])[name], config=config)
    case.write_checkpoint(Path(folder) / "hf")
    tensors, metrics = measure(case, Path(folder) / "hf", ())
    save_file(tensors, Path(folder) / "replayed.safetensors")
    return metrics


def compare(
    name: str, config: Mapping[str, Any], folder: str, flags: Sequence[object]
) -> tuple[float, str, dict[str, float]]:
    """The worst relative error against one process, the tensor that has it, and the shares of changed choices."""
    case = dataclasses.replace(load_cases([name])[name], config=config)
    tensors, metrics = measure(case, Path(folder) / "hf", flags)
    expected = {name: tensor for name, tensor in load_file(Path(folder) / "replayed.safetensors").items()}
    errors = gradient_errors(
        {name: tensor for name, tensor in tensors.items() if "log-probs" not in name},
        {name: tensor for name, tensor in expected.items() if "log-probs" not in name},
    )
    for key in (key for key in tensors if "log-probs" in key):
        errors[key] = float((tensors[key] - expected[key]).abs().max() / expected[key].abs().max())
    worst = max(errors, key=lambda key: errors[key])
    return errors[worst], worst, metrics
