"""Triton kernels of sparse attention and of the indexer's scores; CUDA, bf16 or fp16, accumulating in fp32.

One program handles one query and a block of its heads, which share the query's keys, so keys are gathered once per
block.  The gradient of the keys is summed in fp32 with atomics, so its last bits depend on the order of arrival.

Shapes as in ``sparse_attention.py``; "V" is the part of a key that is also its value, "R" the rest (rotary).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_HEADS_PER_PROGRAM = 16
"""Tensor cores need at least 16 rows."""


class SparseAttentionKernel(torch.autograd.Function):
    """See ``sparse_attention.sparse_attention``."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, indices: Tensor, scale: float, value_dim: int) -> Tensor:
        query, key, indices = query.contiguous(), key.contiguous(), indices.int().contiguous()
        num_queries, num_heads, _ = query.shape
        out = query.new_empty(num_queries, num_heads, value_dim)
        log_sum = query.new_empty(num_queries, num_heads, dtype=torch.float32)
        counts = _listed(indices)
        if num_queries:
            _forward[(num_queries, triton.cdiv(num_heads, _HEADS_PER_PROGRAM))](
                query, key, indices, counts, out, log_sum, scale, num_heads, indices.shape[1],
                **_sizes(query, value_dim), BLOCK_K=32, num_warps=4, num_stages=2,
            )  # fmt: skip
        ctx.save_for_backward(query, key, indices, counts, out, log_sum)
        ctx.scale, ctx.value_dim = scale, value_dim
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, indices, counts, out, log_sum = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        num_queries, num_heads, _ = query.shape
        delta = torch.einsum("tnv,tnv->tn", grad_out.float(), out.float()).contiguous()
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros_like(key, dtype=torch.float32)
        if num_queries:
            _backward[(num_queries, triton.cdiv(num_heads, _HEADS_PER_PROGRAM))](
                query, key, indices, counts, grad_out, log_sum, delta, grad_query, grad_key,
                ctx.scale, num_heads, indices.shape[1],
                **_sizes(query, ctx.value_dim), BLOCK_K=16, num_warps=8, num_stages=1,
            )  # fmt: skip
        return grad_query, grad_key.to(key.dtype), None, None, None


def index_scores_kernel(query: Tensor, weight: Tensor, key: Tensor) -> Tensor:
    """See ``indexer.index_scores``."""
    query, weight, key = query.contiguous(), weight.float().contiguous(), key.contiguous()
    (num_rows, num_heads, width), num_keys = query.shape, key.shape[0]
    scores = query.new_empty(num_rows, num_keys, dtype=torch.float32)
    if num_rows and num_keys:
        block_d = max(triton.next_power_of_2(width), 16)
        grid = (triton.cdiv(num_rows, 64), triton.cdiv(num_keys, 128))
        _index_scores[grid](
            query, weight, key, scores, num_rows, num_keys, num_heads,
            D=width, BLOCK_T=64, BLOCK_S=128, BLOCK_D=block_d, num_warps=8, num_stages=2,
        )  # fmt: skip
    return scores


def _listed(indices: Tensor) -> Tensor:
    """Return [t] int32: the length of each row's list without trailing -1."""
    place = torch.arange(1, indices.shape[1] + 1, dtype=torch.int32, device=indices.device)
    return (place * (indices >= 0)).amax(dim=1).int() if indices.shape[1] else indices.new_zeros(len(indices))


def _sizes(query: Tensor, value_dim: int) -> dict[str, int]:
    rest = query.shape[-1] - value_dim
    return {
        "DV": value_dim,
        "DR": rest,
        "BLOCK_DV": max(triton.next_power_of_2(value_dim), 16),
        "BLOCK_DR": max(triton.next_power_of_2(max(rest, 1)), 16),
        "BLOCK_H": _HEADS_PER_PROGRAM,
    }


@triton.jit
def _forward(
    query_ptr, key_ptr, index_ptr, count_ptr, out_ptr, log_sum_ptr, scale, num_heads, num_listed,
    DV: tl.constexpr, DR: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_DR: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim_v, dim_r = tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_DR)
    has_head, has_v, has_r = head < num_heads, dim_v < DV, dim_r < DR
    query_row = query_ptr + (row * num_heads + head)[:, None] * (DV + DR)
    q_v = tl.load(query_row + dim_v[None, :], mask=has_head[:, None] & has_v[None, :], other=0.0)
    q_r = tl.load(query_row + DV + dim_r[None, :], mask=has_head[:, None] & has_r[None, :], other=0.0)

    largest = tl.full([BLOCK_H], -1e30, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    for first in range(0, tl.load(count_ptr + row), BLOCK_K):
        place = first + tl.arange(0, BLOCK_K)
        index = tl.load(index_ptr + row * num_listed + place, mask=place < num_listed, other=-1).to(tl.int64)
        has_key = index >= 0
        key_row = key_ptr + tl.where(has_key, index, 0)[:, None] * (DV + DR)
        k_v = tl.load(key_row + dim_v[None, :], mask=has_key[:, None] & has_v[None, :], other=0.0)
        k_r = tl.load(key_row + DV + dim_r[None, :], mask=has_key[:, None] & has_r[None, :], other=0.0)
        logits = (tl.dot(q_v, tl.trans(k_v)) + tl.dot(q_r, tl.trans(k_r))) * scale
        logits = tl.where(has_key[None, :], logits, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(logits, 1))
        shrink = tl.exp(largest - new_largest)
        p = tl.exp(logits - new_largest[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(k_v.dtype), k_v)
        largest = new_largest
    # A row without keys gives zeros.
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_row = out_ptr + (row * num_heads + head)[:, None] * DV
    tl.store(out_row + dim_v[None, :], acc.to(out_ptr.dtype.element_ty), mask=has_head[:, None] & has_v[None, :])
    tl.store(log_sum_ptr + row * num_heads + head, largest + tl.log(tl.where(total > 0, total, 1.0)), mask=has_head)


@triton.jit
def _backward(
    query_ptr, key_ptr, index_ptr, count_ptr, grad_out_ptr, log_sum_ptr, delta_ptr, grad_query_ptr, grad_key_ptr,
    scale, num_heads, num_listed,
    DV: tl.constexpr, DR: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_DR: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim_v, dim_r = tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_DR)
    has_head, has_v, has_r = head < num_heads, dim_v < DV, dim_r < DR
    in_v, in_r = has_head[:, None] & has_v[None, :], has_head[:, None] & has_r[None, :]
    query_offset = (row * num_heads + head)[:, None] * (DV + DR)
    q_v = tl.load(query_ptr + query_offset + dim_v[None, :], mask=in_v, other=0.0)
    q_r = tl.load(query_ptr + query_offset + DV + dim_r[None, :], mask=in_r, other=0.0)
    grad_row = grad_out_ptr + (row * num_heads + head)[:, None] * DV
    grad_out = tl.load(grad_row + dim_v[None, :], mask=in_v, other=0.0)
    log_sum = tl.load(log_sum_ptr + row * num_heads + head, mask=has_head, other=0.0)
    delta = tl.load(delta_ptr + row * num_heads + head, mask=has_head, other=0.0)

    acc_v = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    acc_r = tl.zeros([BLOCK_H, BLOCK_DR], tl.float32)
    for first in range(0, tl.load(count_ptr + row), BLOCK_K):
        place = first + tl.arange(0, BLOCK_K)
        index = tl.load(index_ptr + row * num_listed + place, mask=place < num_listed, other=-1).to(tl.int64)
        has_key = index >= 0
        key_offset = tl.where(has_key, index, 0)[:, None] * (DV + DR)
        key_in_v, key_in_r = has_key[:, None] & has_v[None, :], has_key[:, None] & has_r[None, :]
        k_v = tl.load(key_ptr + key_offset + dim_v[None, :], mask=key_in_v, other=0.0)
        k_r = tl.load(key_ptr + key_offset + DV + dim_r[None, :], mask=key_in_r, other=0.0)
        logits = (tl.dot(q_v, tl.trans(k_v)) + tl.dot(q_r, tl.trans(k_r))) * scale
        is_used = has_key[None, :] & has_head[:, None]
        p = tl.where(is_used, tl.exp(logits - log_sum[:, None]), 0.0)
        grad_p = tl.dot(grad_out, tl.trans(k_v))
        grad_logits = (p * (grad_p - delta[:, None]) * scale).to(k_v.dtype)
        acc_v += tl.dot(grad_logits, k_v)
        acc_r += tl.dot(grad_logits, k_r)
        grad_k_v = tl.dot(tl.trans(grad_logits), q_v) + tl.dot(tl.trans(p.to(k_v.dtype)), grad_out)
        grad_k_r = tl.dot(tl.trans(grad_logits), q_r)
        tl.atomic_add(grad_key_ptr + key_offset + dim_v[None, :], grad_k_v, mask=key_in_v, sem="relaxed")
        tl.atomic_add(grad_key_ptr + key_offset + DV + dim_r[None, :], grad_k_r, mask=key_in_r, sem="relaxed")
    dtype = grad_query_ptr.dtype.element_ty
    tl.store(grad_query_ptr + query_offset + dim_v[None, :], acc_v.to(dtype), mask=in_v)
    tl.store(grad_query_ptr + query_offset + DV + dim_r[None, :], acc_r.to(dtype), mask=in_r)


@triton.jit
def _index_scores(
    query_ptr, weight_ptr, key_ptr, score_ptr, num_rows, num_keys, num_heads,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    has_row, has_column, has_dim = row < num_rows, column < num_keys, dim < D
    key = tl.load(key_ptr + column[:, None] * D + dim[None, :], mask=has_column[:, None] & has_dim[None, :], other=0.0)
    acc = tl.zeros([BLOCK_T, BLOCK_S], tl.float32)
    for head in range(0, num_heads):
        query = tl.load(
            query_ptr + (row * num_heads + head)[:, None] * D + dim[None, :],
            mask=has_row[:, None] & has_dim[None, :],
            other=0.0,
        )
        weight = tl.load(weight_ptr + row * num_heads + head, mask=has_row, other=0.0)
        acc += tl.maximum(tl.dot(query, tl.trans(key)), 0.0) * weight[:, None]
    tl.store(score_ptr + row[:, None] * num_keys + column[None, :], acc, mask=has_row[:, None] & has_column[None, :])
