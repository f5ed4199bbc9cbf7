"""The real trainer, driven without Ray: args from flags, a step over ragged data, gradients by checkpoint name.

Used in one process by ``parity`` and on every rank by ``layouts``.
"""

from __future__ import annotations

import math
import zlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import unwrap_model

from slime.backends.megatron_utils.data import get_data_iterator, prepare_rollout_data
from slime.backends.megatron_utils.forward import forward_only
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights, local_part
from slime.backends.megatron_utils.log_probs import get_log_probs_and_entropy
from slime.backends.megatron_utils.megatron_to_hf import hf_form
from slime.backends.megatron_utils.model import build_model
from slime.backends.megatron_utils.model_transform import added_parameters
from slime.backends.megatron_utils.parameters import iter_global_parameters, iter_shards
from slime.backends.megatron_utils.train_step import accumulate_gradients
from slime.backends.megatron_utils.update_weight.gather import iter_hf_tensors, whole_shape
from slime.compose import parse_args, parts
from slime.ray.parts import load_all
from slime.train_data.columns import RankBatch
from slime.utils.types import RolloutBatch
from tests.dist.trainer_case import cut
from tests.matrix.batch import GLOBAL_BATCH_SIZE
from tests.matrix.case import FamilyCase, read_config
from tests.matrix.pool import patience

Chunks = list[torch.nn.Module]


def make_args(case: FamilyCase, folder: Path, *flags: object, world_size: int = 1) -> Namespace:
    """Complete args of a run that only trains the checkpoint in ``folder``; later flags win."""
    argv = [
        *case.flags(folder),
        *("--hf-checkpoint", folder, "--ref-load", folder, "--load", folder, "--debug-train-only"),
        *(() if "--bf16" in flags else ("--fp32",)),
        *("--num-rollout", 4, "--rollout-batch-size", 4, "--n-samples-per-prompt", 2),
        *("--global-batch-size", GLOBAL_BATCH_SIZE, "--actor-num-gpus-per-node", world_size),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 48, "--data-pad-size-multiplier", 4),
        *("--lr", 1e-3, "--lr-decay-style", "constant", "--weight-decay", 0.1),
        *("--attention-dropout", 0, "--hidden-dropout", 0, "--disable-rollout-global-dataset"),
        *("--distributed-timeout-minutes", math.ceil(2 * patience()), "--loss-type", "sft_loss"),
        *flags,
    ]
    return parse_args(argv=[str(word) for word in argv])


def rank_data_of(args: Namespace, train_data: dict[str, Any]) -> RankBatch:
    """This rank's share, split and packed as by the rollout manager."""
    parallel = {
        "dp_size": mpu.get_data_parallel_world_size(),
        "cp_size": mpu.get_context_parallel_world_size(),
        "vpp_size": args.virtual_pipeline_model_parallel_size or 1,
        "microbatch_group_size_per_vp_stage": args.microbatch_group_size_per_vp_stage,
    }
    return cut(args, train_data, parallel)[mpu.get_data_parallel_rank()]


def load_model(args: Namespace) -> Chunks:
    """This rank's chunks with gradient buffers (complete ones, whatever the optimizer) and the checkpoint's
    weights."""
    model = build_model(
        Namespace(**{**vars(args), "use_distributed_optimizer": False}), transforms=load_all(parts(args).transforms)
    )
    load_hf_weights(args, model, args.hf_checkpoint)
    unwrap_model(model[0]).config.finalize_model_grads_func = finalize_model_grads
    return model


def response_log_probs(args: Namespace, model: Chunks, data: RolloutBatch) -> list[Tensor]:
    """Log-probs of the responses, in the order of this rank's samples; empty except on the last pipeline stage."""
    iterators = get_data_iterator(data, len(model))
    result = forward_only(get_log_probs_and_entropy, args, model, iterators, data["num_microbatches"])
    return result.get("log_probs", [])


def run_backward(args: Namespace, model: Chunks, data: RolloutBatch) -> list[dict[str, Any]]:
    """Gradients of one whole step in the chunks' buffers; return the micro-batches' reports."""
    for chunk in model:
        chunk.zero_grad_buffer()
        chunk.train()
    iterators = get_data_iterator(data, len(model))
    return accumulate_gradients(
        args,
        "matrix",
        iterators,
        model,
        data["num_microbatches"][0],
        data["global_batch_sizes"][0],
        loss_type=args.loss_type,
    )


def prepare(args: Namespace, train_data: dict[str, Any]) -> RolloutBatch:
    """This rank's data as tensors."""
    return prepare_rollout_data(rank_data_of(args, train_data))


def model_gradients(args: Namespace, model: Sequence[torch.nn.Module]) -> dict[str, Tensor]:
    """Complete gradients by checkpoint name, through the code that exports weights.  Collective.

    Returned on the CPU, in the parameters' layout.  Frozen parameters and buffers give zeros.  If adapters
    are trained, only theirs, under PEFT's names.
    """
    gradients = {}
    has_adapters = added_parameters(model) is not None
    for shard in iter_shards(model, added=has_adapters):
        gradient = getattr(shard.parameter, "main_grad", None)
        gradients[shard.key] = torch.zeros_like(shard.parameter) if gradient is None else gradient.detach()
    if has_adapters:
        from slime.ext.lora.state import adapter_table, iter_peft_tensors

        tensors = iter_peft_tensors(adapter_table(args), model, host_weights=gradients)
    else:
        model_name = read_config(Path(args.hf_checkpoint))["model_type"]
        tensors = iter_hf_tensors(hf_form(args, model_name), model, dtype=None, host_weights=gradients)
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors}


@torch.no_grad()
def draw_adapters(model: Sequence[torch.nn.Module]) -> None:
    """Fill B of every adapter, which starts at zero, with numbers that do not depend on the layout."""
    is_gated = unwrap_model(model[0]).config.gated_linear_unit
    for name, shard in iter_global_parameters(model, added=True):
        if ".lora.b" in name:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = torch.randn(whole_shape(shard), generator=generator) * 0.2
            shard.tensor.copy_(local_part(shard, whole, is_gated=is_gated))


def export(
    args: Namespace, model: Sequence[torch.nn.Module], *, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a weight push, complete and named as in the checkpoint.  Collective."""
    model_name = read_config(Path(args.hf_checkpoint))["model_type"]
    return iter_hf_tensors(hf_form(args, model_name), model, dtype=dtype)
