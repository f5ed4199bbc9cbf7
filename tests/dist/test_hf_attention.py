"""An attention computed by a Hugging Face style module: the same numbers in every layout."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from slime_plugins.models.hf_attention import HuggingfaceAttention
from tests.dist.trainer_case import write_model
from tests.matrix.pool import run_ranks

pytestmark = pytest.mark.dist

HIDDEN = 8
OFFSETS = [0, 8, 20, 32]
"""Lengths of three sequences; multiples of 4, as padded for two context-parallel ranks."""


class RunningMean(HuggingfaceAttention):
    """Projects the mean of the sequence's tokens so far, so that any mistake in their order shows."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.proj = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        with torch.no_grad():
            self.proj.weight.copy_(torch.arange(HIDDEN * HIDDEN).view(HIDDEN, HIDDEN).sin())

    def hf_forward(self, hidden_states: Tensor, packed_seq_params: PackedSeqParams) -> Tensor:
        assert hidden_states.shape[0] == 1
        cu = packed_seq_params.cu_seqlens_q.tolist()
        means = []
        for begin, end in zip(cu, cu[1:], strict=False):
            counts = torch.arange(1, end - begin + 1)[:, None]
            means.append(hidden_states[0, begin:end].cumsum(0) / counts)
        return self.proj(torch.cat(means)).tanh()[None]


def stream() -> tuple[Tensor, Tensor]:
    """Input and loss weights, [T, 1, hidden]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(OFFSETS[-1], 1, HIDDEN, generator=generator), torch.randn(
        OFFSETS[-1], 1, HIDDEN, generator=generator
    )


def places(cp_rank: int, cp_size: int) -> Tensor:
    """The tokens of a context-parallel rank, in the order in which it holds them."""
    if cp_size == 1:
        return torch.arange(OFFSETS[-1])
    pieces = []
    for begin, end in zip(OFFSETS, OFFSETS[1:], strict=False):
        chunks = torch.arange(begin, end).chunk(2 * cp_size)
        pieces += [chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]]
    return torch.cat(pieces)


def run_layout(hf: str, *, tp: int = 1, cp: int = 1) -> dict[str, Any]:
    mpu.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, tensor_model_parallel_size=tp,
        context_parallel_size=cp, sequence_parallel=tp > 1, use_cpu_initialization=True,
    )  # fmt: skip
    layer = RunningMean(Namespace(hf_checkpoint=hf), config, layer_number=1)
    assert (layer.hf_layer_idx, layer.hf_config.model_type) == (0, "qwen3")
    cu = torch.tensor(OFFSETS, dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
    mine = places(mpu.get_context_parallel_rank(), cp).chunk(tp)[mpu.get_tensor_model_parallel_rank()]
    hidden, weights = (x[mine] for x in stream())
    hidden.requires_grad_()
    out, bias = layer(hidden, attention_mask=None, packed_seq_params=packed, rotary_pos_emb=None)
    assert bias is None
    (out * weights).sum().backward()
    weight_grad = layer.proj.weight.grad
    return {
        "places": mine.tolist(),
        "out": out.detach().tolist(),
        "grad": hidden.grad.tolist(),
        "weight_grad": weight_grad.tolist(),
    }


def on_tensor_ranks(hf: str) -> dict[str, Any]:
    return run_layout(hf, tp=2)


def on_context_ranks(hf: str) -> dict[str, Any]:
    return run_layout(hf, cp=2)


def joined(ranks: list[dict[str, Any]], name: str) -> Tensor:
    whole = torch.full((OFFSETS[-1], 1, HIDDEN), float("nan"))
    for rank in ranks:
        whole[rank["places"]] = torch.tensor(rank[name])
    return whole


def test_tensor_and_context_parallel_ranks_compute_what_one_rank_does(tmp_path: Path) -> None:
    write_model(tmp_path / "hf")
    (alone,) = run_ranks(run_layout, 1, str(tmp_path / "hf"))
    for function in (on_tensor_ranks, on_context_ranks):
        ranks = run_ranks(function, 2, str(tmp_path / "hf"))
        for name in ("out", "grad"):
            torch.testing.assert_close(joined(ranks, name), torch.tensor(alone[name]), atol=1e-6, rtol=1e-5)
        grads = [torch.tensor(rank["weight_grad"]) for rank in ranks]
        # Each tensor-parallel rank holds the whole gradient; over context-parallel ranks the trainer sums it.
        parts = grads[:1] if function is on_tensor_ranks else grads
        torch.testing.assert_close(sum(parts), torch.tensor(alone["weight_grad"]), atol=1e-5, rtol=1e-5)
        if function is on_tensor_ranks:
            torch.testing.assert_close(grads[0], grads[1])
