"""Attention of each query to its own list of keys, over latents that all heads share.

Multi-latent attention in its absorbed form: one key per token, whose first dimensions are also its value.

    out[t, n] = sum over j of p[t, n, j] * key[indices[t, j], :value_dim]
    p[t, n]   = softmax over j of query[t, n] . key[indices[t, j]] * scale,      entries with index -1 left out

Both implementations hold only a block of gathered keys at a time: never t x t logits, and no expanded keys.

Shapes: t = queries of this rank, n = heads of this rank, s = keys of the whole stream, k = keys per query, d = key
width, v = value width (v <= d).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Gathered key elements per block of rows, in the plain torch implementation."""


def sparse_attention(query: Tensor, key: Tensor, indices: Tensor, *, scale: float, value_dim: int) -> Tensor:
    """Attend from each query to its own keys; return [t, n, v], differentiable in ``query`` and ``key``.

    Uses a Triton kernel on CUDA in bf16 or fp16, otherwise plain torch; both accumulate in fp32 (fp64 for fp64).

    Args:
        query: [t, n, d]
        key: [s, d]
        indices: [t, k] integer indices of keys; -1 is no key. No key may be listed twice. A query without keys gives
            zeros.
        scale: factor of the logits.
        value_dim: v.
    """
    assert indices.shape[0] == query.shape[0] and query.shape[-1] == key.shape[-1], (query.shape, key.shape)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        from slime_plugins.models.glm5.sparse_kernels import SparseAttentionKernel

        return SparseAttentionKernel.apply(query, key, indices, scale, value_dim)
    return _PlainSparseAttention.apply(query, key, indices, scale, value_dim)


class _PlainSparseAttention(torch.autograd.Function):
    """Sparse attention in blocks of rows; saves the output and one number per query and head, recomputes the rest."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, indices: Tensor, scale: float, value_dim: int) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty(*query.shape[:2], value_dim)
        log_sum = query.new_empty(query.shape[:2], dtype=wide)
        for rows in _row_blocks(query, indices):
            keys, logits = _logits(query[rows], key, indices[rows], scale, wide)
            log_sum[rows] = logits.logsumexp(-1).clamp_min(torch.finfo(wide).min)
            probabilities = (logits - log_sum[rows][..., None]).exp()
            out[rows] = torch.einsum("bnk,bkv->bnv", probabilities, keys[..., :value_dim]).to(out.dtype)
        ctx.save_for_backward(query, key, indices, out, log_sum)
        ctx.scale, ctx.value_dim = scale, value_dim
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, indices, out, log_sum = ctx.saved_tensors
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros_like(key, dtype=log_sum.dtype)
        for rows in _row_blocks(query, indices):
            q, grad = query[rows].to(log_sum.dtype), grad_out[rows].to(log_sum.dtype)
            keys, logits = _logits(q, key, indices[rows], ctx.scale, log_sum.dtype)
            p = (logits - log_sum[rows][..., None]).exp()
            # Gradient of the softmax: p * (dp - sum p dp); the sum is the dot product of output and its gradient.
            grad_p = torch.einsum("bnv,bkv->bnk", grad, keys[..., : ctx.value_dim])
            delta = (grad * out[rows]).sum(-1, keepdim=True)
            grad_logits = p * (grad_p - delta) * ctx.scale
            grad_query[rows] = torch.einsum("bnk,bkd->bnd", grad_logits, keys).to(query.dtype)
            grad_keys = torch.einsum("bnk,bnd->bkd", grad_logits, q)
            grad_keys[..., : ctx.value_dim] += torch.einsum("bnk,bnv->bkv", p, grad)
            # Entries without a key have p = 0: they add zeros to key 0.
            grad_key.index_add_(0, indices[rows].clamp_min(0).flatten().long(), grad_keys.flatten(0, 1))
        return grad_query, grad_key.to(key.dtype), None, None, None


def _logits(query: Tensor, key: Tensor, indices: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the gathered keys [b, k, d] and the scaled logits [b, n, k] of a block, -inf if there is no key."""
    keys = key[indices.clamp_min(0)].to(dtype)
    logits = torch.einsum("bnd,bkd->bnk", query.to(dtype), keys) * scale
    return keys, logits.masked_fill(indices[:, None] < 0, float("-inf"))


def _row_blocks(query: Tensor, indices: Tensor) -> Iterator[slice]:
    """Yield row ranges whose gathered keys have at most ``_BLOCK_ELEMENTS`` elements each."""
    per_row = max(indices.shape[1] * query.shape[-1], 1)
    block = max(_BLOCK_ELEMENTS[query.device.type] // per_row, 1)
    for start in range(0, query.shape[0], block):
        yield slice(start, min(start + block, query.shape[0]))
