"""What layers keep for the backward pass: against autograd's own count, and against peaks measured on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.backends.megatron_utils.flags.parallel import ParallelSizes
from slime.ext.plan.activations import (
    MicroBatch,
    Recompute,
    chunk_activations,
    layer_bytes,
    layer_terms,
    tower_activations,
)
from slime.ext.plan.layout import StageChunk
from slime.ext.plan.parameters import chunk_parameters
from slime.ext.plan.trainer_memory import GIB, TrainerSettings, micro_batches_in_flight, rank_memory
from slime.ext.vision.towers import TOWERS
from slime.train_data.model_dims import ModelDims
from tests.matrix.case import hide_broken_torchvision
from tests.unit.backends.megatron_utils.megatron_case import parse, start_single_process

TOKENS = 512
SMALL = (
    "--num-layers 2 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --kv-channels 32 --vocab-size 256 "
    "--swiglu --disable-bias-linear --normalization RMSNorm --use-rotary-position-embeddings --bf16 "
    "--num-experts 16 --moe-layer-freq [0,1] --moe-ffn-hidden-size 64 --moe-router-topk 4 --moe-router-dtype fp32 "
    "--moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-enable-expert-bias "
    "--moe-aux-loss-coeff 0 --moe-grouped-gemm --moe-shared-expert-intermediate-size 128 "
    "--moe-token-dispatcher-type alltoall"
)


def qwen3(hidden: int, ffn: int, heads: int, layers: int) -> ModelDims:
    return ModelDims(
        num_layers=layers, hidden_size=hidden, ffn_hidden_size=ffn, vocab_size=151936, has_tied_embeddings=True,
        num_attention_heads=heads, num_query_groups=8, head_dim=128,
        has_qk_norm=True, is_moe=(False,) * layers,
    )  # fmt: skip


def bytes_that_autograd_keeps(run: Callable[[], Any], given: list[torch.Tensor]) -> int:
    """Bytes of all storages that the graph of ``run()`` holds, except those of ``given``."""
    known = {tensor.untyped_storage().data_ptr() for tensor in given}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = run()  # alive until the count is read, so that no storage address is reused
    total = sum(kept.values())
    del output
    return total


@pytest.mark.parametrize("layer", [0, 1], ids=["MLP", "experts"])
def test_the_second_half_of_a_layer_keeps_what_its_terms_say(layer):
    from slime.backends.megatron_utils.model_provider import get_model_provider

    args = parse(*SMALL.split())
    start_single_process(args)
    model = get_model_provider(args)().bfloat16()
    hidden = torch.randn(TOKENS, 1, 128, dtype=torch.bfloat16, requires_grad=True) * 1.0
    mlp = model.decoder.layers[layer].mlp
    kept = bytes_that_autograd_keeps(lambda: mlp(hidden), [hidden, *model.parameters()])
    terms = layer_terms(model_dims(args, {}), ParallelSizes(), MicroBatch(tokens=TOKENS), layer)
    of_mlp = ("MLP", "router", "rows of experts", "inside of experts", "weights of rows", "shared experts")
    assert kept == sum(terms.get(name, 0) for name in of_mlp)


MEASURED = (
    # (GiB, dims, layout, recompute), 16,384 tokens per micro-batch: benchmarks/results
    (37.1, qwen3(1024, 3072, 16, 28), ParallelSizes(), Recompute()),
    (67.7, qwen3(2048, 6144, 16, 28), ParallelSizes(), Recompute()),
    (36.1, qwen3(2048, 6144, 16, 28), ParallelSizes(), Recompute(granularity="full", method="uniform")),
    (133.5, qwen3(2560, 9728, 32, 36), ParallelSizes(), Recompute(granularity="selective", modules=("layernorm",))),
    (69.8, qwen3(2560, 9728, 32, 36), ParallelSizes(world=2, tensor=2, sequence_parallel=True), Recompute()),
)


@pytest.mark.parametrize("measured, dims, sizes, recompute", MEASURED)
def test_peaks_are_those_measured(measured, dims, sizes, recompute):
    chunks = [StageChunk(tuple(range(dims.num_layers)), True, True)]
    settings = TrainerSettings(batch=MicroBatch(tokens=16384), recompute=recompute)
    memory = rank_memory(chunks, 0, chunk_parameters(chunks, dims, sizes), dims, sizes, settings)
    assert memory.peak / GIB == pytest.approx(measured, rel=0.01)


def test_recompute_keeps_inputs_of_groups_or_of_the_first_layers():
    dims, batch, sizes = qwen3(1024, 3072, 16, 6), MicroBatch(tokens=100), ParallelSizes()
    layers, row, whole = tuple(range(6)), 100 * 1024 * 2, layer_bytes(qwen3(1024, 3072, 16, 6), sizes, batch, 0)

    def kept(**settings: Any) -> tuple[int, int]:
        found = chunk_activations(layers, dims, sizes, batch, Recompute(**settings))
        return found.kept, found.again

    assert kept() == (6 * whole, 0)
    assert kept(granularity="full", method="uniform", num_layers=1) == (6 * row, whole)
    assert kept(granularity="full", method="uniform", num_layers=4) == (2 * row, 4 * whole)
    assert kept(granularity="full", method="block", num_layers=2) == (2 * row + 4 * whole, whole)


def test_micro_batches_in_flight_follow_the_schedule():
    settings = TrainerSettings(batch=MicroBatch(tokens=1), num_microbatches=8, vp_group=4)
    plain, virtual = ParallelSizes(world=4, pipeline=4), ParallelSizes(world=4, pipeline=4, virtual=2)
    assert [micro_batches_in_flight(stage, plain, settings) for stage in range(4)] == [4, 3, 2, 1]
    assert [micro_batches_in_flight(stage, virtual, settings) for stage in range(4)] == [11, 9, 7, 5]
    one = TrainerSettings(batch=MicroBatch(tokens=1), num_microbatches=1)
    assert micro_batches_in_flight(0, plain, one) == 1


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("deep", [[], [0, 2]])
def test_a_trained_tower_keeps_what_autograd_counts(tmp_path: Path, element_bytes: int, deep: list[int]) -> None:
    hide_broken_torchvision()
    import transformers

    vision = {
        **{"depth": 3, "hidden_size": 64, "intermediate_size": 160, "num_heads": 4, "in_channels": 3},
        **{"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 256},
        **{"out_hidden_size": 96, "deepstack_visual_indexes": deep},
    }
    config = transformers.Qwen3VLConfig(vision_config=vision).vision_config
    model = transformers.AutoModel.from_config(
        config, dtype=torch.bfloat16 if element_bytes == 2 else torch.float32, attn_implementation="sdpa"
    )
    dims = replace(qwen3(64, 64, 4, 2), tower=TOWERS["qwen3_vl"].dims(vision, is_trained=True))
    assert dims.tower is not None
    batch = MicroBatch(tokens=512, element_bytes=element_bytes, patches=dims.tower.patches_of(32 * 4 + 3, 32 * 4))
    assert batch.patches == 1024
    pixels = torch.randn(batch.patches, dims.tower.patch_size).to(model.dtype)
    counted = bytes_that_autograd_keeps(
        lambda: model(pixels, grid_thw=torch.tensor([[1, 32, 32]])), [pixels, *model.parameters(), *model.buffers()]
    )
    # Outside the graph: the pixels in fp32 and in the model's dtype, and the language model's input.
    output = element_bytes * (1 + len(deep)) * 96 // 4
    beside = batch.patches * ((element_bytes + 4) * dims.tower.patch_size + output)
    assert tower_activations(dims, batch).kept - beside == pytest.approx(counted, rel=0.005)
