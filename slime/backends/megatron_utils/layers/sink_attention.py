"""Causal attention over packed sequences with sinks: one learned logit per head in the softmax's denominator.

    p[i, j] = exp(s[i, j]) / (exp(sink) + sum over visible k of exp(s[i, k])),    out[i] = sum over j of p[i, j] v[j]

A sink is a key whose value is zero (StreamingLLM, arXiv 2309.17453; gpt-oss).  It must count once per query, so a call
needs all keys of its queries; under context parallelism a rank gathers the keys of its chunks.

Shapes: t = tokens of this rank, h = heads of this rank, d = head dimension.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.utils import divide
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform


def make_sinks(config: TransformerConfig, tp_group: torch.distributed.ProcessGroup) -> torch.nn.Parameter:
    """Return the sinks of this rank's heads, [h], initially 0: the logit of a key with score 0."""
    num_heads = divide(config.num_attention_heads, tp_group.size())
    sinks = torch.nn.Parameter(torch.zeros(num_heads, **cpu_platform.of_new_parameters(config)))
    set_tensor_model_parallel_attributes(sinks, True, 0, 1)
    return sinks


def visible_keys(num_q: int, num_k: int, window: int | None, device: torch.device) -> Tensor:
    """Return the keys that each query sees, bool [num_q, num_k]; the last query is at the last key.

    ``window`` is the number of keys, including the query's own; None for all keys up to its own.
    """
    mask = torch.ones(num_q, num_k, dtype=torch.bool, device=device).tril(num_k - num_q)
    return mask if window is None else mask.triu(num_k - num_q - window + 1)


def sink_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, *, scale: float, window: int | None = None
) -> Tensor:
    """Attend within one sequence, on any device; the softmax is computed in fp32 (fp64 for fp64).

    Args:
        query, key, value: [t, h, d]; keys and values may have fewer heads; the last query is at the last key.
        sinks: [h] logits.
        window: number of keys that a query sees, including its own; None for all keys up to its own.

    Returns:
        [t, h, d] in the dtype of ``query``.
    """
    repeats = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    dtype = torch.promote_types(query.dtype, torch.float32)
    mask = visible_keys(query.size(0), key.size(0), window, query.device)
    scores = torch.einsum("qhd,khd->hqk", query, key).to(dtype) * scale
    scores = scores.masked_fill(~mask, -math.inf)
    sink = sinks.to(dtype)[:, None, None].expand(-1, query.size(0), 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights.to(value.dtype), value)


def varlen_sink_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attend over all sequences with torch's flash kernel; CUDA, bf16 or fp16.  Does not synchronize with the host.

    Arguments as in :func:`sink_attention`, packed; ``cu_q`` and ``cu_k`` are cumulative lengths.
    """
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    # As in torch.nn.attention.varlen: with a window the kernel is causal without the flag.
    options = {"scale": scale, "window_size_left": -1 if window is None else window - 1, "window_size_right": 0}
    sizes = (cu_q.int(), cu_k.int(), max_q, max_k, 0.0, window is None)
    return _FlashWithSinks.apply(query, key, value, sinks, sizes, options)


class _FlashWithSinks(torch.autograd.Function):
    """The flash kernel, with forward and backward passes corrected for the sink.

    The kernel returns L = log sum_k exp(s[i, k]).  With a sink, the output of each query is scaled by
    sigmoid(L - sink); the sink takes the rest of the probability.  The kernel's backward pass recomputes
    p = exp(s - L') and dS = p (dP - D) with D = sum of dout * out.  Given L' = log(exp(L) + exp(sink)) and the output,
    both including the sink, these are the gradients of queries, keys and values.  The sink, whose value is zero, gets
    - sum_i p_sink[i] D[i].
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        sizes: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Tensor:
        plain, lse_ht, state, unused, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *sizes, return_debug_mask=False, **options
        )
        sink_h1 = sinks.float()[:, None]
        share_th = (lse_ht - sink_h1).sigmoid().t()
        out = (plain.float() * share_th[..., None]).to(plain.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, torch.logaddexp(lse_ht, sink_h1), state, unused)
        ctx.sizes, ctx.options = sizes, options
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse_ht, state, unused = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, lse_ht, *ctx.sizes, state, unused, **ctx.options
        )
        along_th = (grad.float() * out.float()).sum(dim=-1)
        sink_part_ht = (sinks.float()[:, None] - lse_ht).exp()
        grad_sinks = -(sink_part_ht * along_th.t()).sum(dim=1).to(sinks.dtype)
        return grad_q, grad_k, grad_v, grad_sinks, None, None
