"""Two ranks give the log-probs and gradients of transformers' single process, in every layout of two ranks."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.dist.gloo_ranks import run_ranks
from tests.unit.backends.megatron_utils.megatron_case import hf_flags, write_hf_model

LAYOUTS: dict[str, tuple[str, ...]] = {
    "tensor": ("--tensor-model-parallel-size", "2"),
    "tensor-and-sequence": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "data": (),
    "data-overlapped": ("--overlap-grad-reduce",),
    "context": ("--context-parallel-size", "2"),
    "tensor-recompute": (
        *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
        *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
}
FAMILIES = ("qwen2", "qwen3")
LENGTHS = (12, 4, 20, 8)
"""Multiples of 2 * context ranks, and their sum one of the tensor ranks."""


def batch() -> tuple[list[Tensor], list[Tensor]]:
    """Sequences, and a weight for every predicted position; some are masked, one sequence wholly."""
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randint(0, 131, (length,), generator=generator) for length in LENGTHS]
    weights = [torch.rand(length - 1, generator=generator) + 0.5 for length in LENGTHS]
    weights[0][:6] = 0
    weights[1][:] = 0
    return sequences, weights


def write_reference(folder: Path, family: str) -> None:
    """A HF model, and beside it its gradients in the same form."""
    model = write_hf_model(folder / "model", family)
    sequences, weights = batch()
    loss = torch.zeros(())
    for tokens, weight in zip(sequences, weights):
        log_probs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        loss = loss - (log_probs * weight).sum()
    loss.backward()
    gradients = {name: parameter.grad.contiguous() for name, parameter in model.named_parameters()}
    (folder / "gradients").mkdir()
    save_file(gradients, folder / "gradients" / "model.safetensors")
    save_file({"loss": loss.detach()}, folder / "loss.safetensors")


def zigzag(x: Tensor, rank: int, size: int) -> Tensor:
    """The two chunks of a sequence that a context-parallel rank holds."""
    chunks = x.chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def run_layout(folder: Path, flags: tuple[str, ...]) -> dict[str, Any]:
    """Loss of the whole batch, and the worst relative gradient error of this rank's parameters."""
    from megatron.core import mpu
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from slime.backends.megatron_utils.config_builders import ddp_config_from_args
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model_provider import get_model_provider
    from tests.unit.backends.megatron_utils.megatron_case import parse, start_parallel

    args = parse(*hf_flags(folder / "model"), "--actor-num-gpus-per-node", 2, "--fp32", *flags)
    start_parallel(args)
    args.use_distributed_optimizer = False  # whole gradients on every rank, to be compared
    model = DistributedDataParallel((module := get_model_provider(args)()).config, ddp_config_from_args(args), module)
    load_hf_weights(args, [model], folder / "model")
    model.zero_grad_buffer()

    cp_rank, cp_size = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
    dp_rank, dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    sequences, weights = batch()
    mine = range(dp_rank, len(sequences), dp_size)
    targets = [sequences[i].roll(-1) for i in mine]
    padded_weights = [torch.cat([weights[i], torch.zeros(1)]) for i in mine]
    tokens, target, weight = (
        torch.cat([zigzag(x, cp_rank, cp_size) for x in columns])
        for columns in ([sequences[i] for i in mine], targets, padded_weights)
    )
    lengths = [len(sequences[i]) for i in mine]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths)
    )
    logits = model(input_ids=tokens[None], position_ids=None, attention_mask=None, packed_seq_params=params)
    whole = gather_from_tensor_model_parallel_region(logits)[0, :, : args.vocab_size]
    loss = -(whole.log_softmax(-1).gather(1, target[:, None])[:, 0] * weight).sum()
    # Gradients are averaged over data and context ranks; the reference sums.
    (loss * dp_size * cp_size).backward()
    finalize_model_grads([model])
    total = loss.detach().clone()
    torch.distributed.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return {"loss": total.item(), "errors": gradient_errors(args, model, folder)}


def gradient_errors(args: Namespace, model: torch.nn.Module, folder: Path) -> dict[str, float]:
    """For each parameter of this rank, the relative distance of its gradient to the reference's slice."""
    from slime.backends.megatron_utils.hf_to_megatron import local_part, weight_map_of
    from slime.backends.megatron_utils.hf_to_megatron.tensors import HfTensors
    from slime.backends.megatron_utils.parameters import iter_global_parameters
    from slime.backends.megatron_utils.weight_layouts import ModelShape, pad_vocabulary
    from slime.backends.megatron_utils.weight_maps.rule import from_hf

    weight_map = weight_map_of(folder / "model")
    shape = ModelShape.from_args(args)
    reference = load_file(folder / "gradients" / "model.safetensors")
    global_norm = torch.cat([gradient.flatten() for gradient in reference.values()]).norm().item()
    errors = {}
    with HfTensors(folder / "gradients") as tensors:
        for name, shard in iter_global_parameters([model]):
            full = from_hf(weight_map, name, tensors.get, shape)
            if "embedding" in name or "output_layer" in name:
                full = pad_vocabulary(full, shape)
            expected = local_part(shard, full)
            error = (shard.parameter.main_grad - expected).norm() / max(expected.norm().item(), 1e-3 * global_norm)
            errors[name] = error.item()
    return errors


def run_all(folder: str) -> dict[str, dict[str, Any]]:
    """Every layout of every family in one pair of processes; starting them costs more than running them."""
    return {
        f"{family}/{layout}": run_layout(Path(folder) / family, flags)
        for family in FAMILIES
        for layout, flags in LAYOUTS.items()
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("layouts")
    for family in FAMILIES:
        write_reference(folder / family, family)
    return folder, run_ranks(run_all, 2, str(folder))


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_the_loss_and_gradients_of_transformers(
    outcomes: tuple[Path, list[dict[str, dict[str, Any]]]], family: str, layout: str
) -> None:
    folder, ranks = outcomes
    loss = load_file(folder / family / "loss.safetensors")["loss"].item()
    for rank in ranks:
        outcome = rank[f"{family}/{layout}"]
        assert outcome["loss"] == pytest.approx(loss, rel=1e-5)
        worst = max(outcome["errors"], key=outcome["errors"].get)
        assert outcome["errors"][worst] <= 1e-4, worst
