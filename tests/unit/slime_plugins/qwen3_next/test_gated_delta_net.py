"""The whole layer: packed against separate, recomputed against stored, initial values."""

from __future__ import annotations

import torch
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.packed_seq_params import PackedSeqParams

from slime.backends.megatron_utils.model_provider import get_model_provider
from tests.unit.backends.megatron_utils.megatron_case import parse, start_single_process

FLAGS = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --kv-channels 8 --vocab-size 64 "
    "--swiglu --disable-bias-linear --normalization RMSNorm --use-rotary-position-embeddings --fp32 --qk-layernorm "
    "--apply-layernorm-1p --attention-output-gate --spec slime_plugins.models.qwen3_next get_qwen3_next_spec "
    "--linear-attention-freq 2 --linear-num-key-heads 2 --linear-num-value-heads 6 --linear-key-head-dim 12 "
    "--linear-value-head-dim 10 --linear-conv-kernel-dim 3"
)


def attention(*flags: str) -> torch.nn.Module:
    args = parse(*FLAGS.split(), *flags)
    start_single_process(args)
    layer = get_model_provider(args)().decoder.layers[0].self_attention
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return layer.train()


def packed(*lengths: int) -> PackedSeqParams:
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def run(layer: torch.nn.Module, hidden: Tensor, *lengths: int) -> tuple[Tensor, list[Tensor]]:
    hidden = hidden.clone().requires_grad_()
    out, bias = layer(hidden, packed_seq_params=packed(*lengths))
    assert bias is None
    return out.detach(), list(torch.autograd.grad(out.square().sum(), [hidden, *layer.parameters()]))


def test_sequences_come_out_packed_as_they_do_alone():
    layer, hidden, lengths = attention(), torch.randn(80, 1, 32), (1, 70, 3, 6)
    out, gradients = run(layer, hidden, *lengths)
    alone = [run(layer, part, len(part)) for part in hidden.split(lengths)]
    torch.testing.assert_close(out, torch.cat([part for part, _ in alone]), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(gradients[0], torch.cat([grads[0] for _, grads in alone]), atol=1e-4, rtol=1e-3)
    for index, gradient in enumerate(gradients[1:], start=1):
        torch.testing.assert_close(gradient, sum(grads[index] for _, grads in alone), atol=1e-3, rtol=1e-3)


def test_recomputed_is_the_same():
    hidden = torch.randn(20, 1, 32)
    kept, kept_gradients = run(attention(), hidden, 15, 5)
    layer = attention("--recompute-granularity", "selective", "--recompute-modules", "core_attn")
    assert layer.recomputes_core
    hidden_in = hidden.clone().requires_grad_()
    out, _ = layer(hidden_in, packed_seq_params=packed(15, 5))
    out.square().sum().backward()  # megatron-core's checkpoint supports only backward()
    assert torch.equal(out, kept)
    for gradient, parameter in zip(kept_gradients, [hidden_in, *layer.parameters()], strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
