"""Mamba-2's selective state space (Transformers are SSMs, arXiv 2405.21060) over packed sequences.

A head's state S [dk, dv] starts at zero in every sequence.  With the step d_t > 0 and the head's rate A < 0, each
token decays the state, writes to it, and reads from it; the skip D adds its input:

    S_t = exp(d_t A) S_(t-1) + k_t (d_t x_t)^T
    y_t = S_t^T q_t + D x_t

q and k (C and B in the paper) are shared by the r heads of a group.  Within a chunk G_i is the sum of d A up to token
i, so that the tokens of a chunk are matrix products (the dual form) and only chunks follow each other:

    Y = exp(G) Q S + (Q K^T exp(G_i - G_j), j <= i) (d X)
    S' = exp(G_C) S + (exp(G_C - G) K)^T (d X)

Shapes: t = tokens, g = groups, r = heads of a group, dk = width of the state, dv = width of a head, n = chunks of c
tokens.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from slime_plugins.models.qwen3_next.packed_rows import CHUNK, PackedRows

Kernel = Callable[..., Tensor]
"""``mamba_chunk_scan_combined`` of ``mamba-ssm``: outputs [1, t, heads, dv]."""


def state_space(
    query: Tensor, key: Tensor, value: Tensor, step: Tensor, rate: Tensor, skip: Tensor, rows: PackedRows
) -> Tensor:
    """Return [t, g, r, dv] in the dtype of ``value``, with ``mamba-ssm``'s kernel on CUDA in bf16 or fp16, otherwise
    with :func:`chunked_state_space`.

    Args:
        query, key: [t, g, dk].
        value: [t, g, r, dv].
        step: [t, g, r], positive, fp32.
        rate: [g, r], negative, fp32.
        skip: [g, r], fp32.
        rows: the packing.
    """
    kernel = mamba_kernel() if value.is_cuda and value.dtype in (torch.bfloat16, torch.float16) else None
    if kernel is None:
        return chunked_state_space(query, key, value, step, rate, skip, rows)
    return by_kernel(kernel, query, key, value, step, rate, skip, rows)


def by_kernel(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, step: Tensor, rate: Tensor, skip: Tensor,
    rows: PackedRows,
) -> Tensor:  # fmt: skip
    """Run :func:`state_space` with a kernel that takes the index of each token's sequence."""
    token = torch.arange(len(value), device=value.device)
    sequence = torch.searchsorted(rows.cu_seqlens[1:], token, right=True).int()
    out = kernel(
        value.flatten(1, 2)[None],
        step.flatten(1)[None],
        rate.flatten(),
        key[None],
        query[None],
        chunk_size=CHUNK,
        D=skip.flatten(),
        seq_idx=sequence[None],
    )
    return out[0].unflatten(1, value.shape[1:3])


@functools.cache
def mamba_kernel() -> Kernel | None:
    """Return the Triton kernel of mamba-ssm; None if the package is not installed."""
    if importlib.util.find_spec("mamba_ssm") is None:
        return None
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return mamba_chunk_scan_combined


def chunked_state_space(
    query: Tensor, key: Tensor, value: Tensor, step: Tensor, rate: Tensor, skip: Tensor, rows: PackedRows
) -> Tensor:
    """Run :func:`state_space` in plain torch, on any device."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    q, k = (rows.in_chunks(x.to(dtype))[:, :, None] for x in (query, key))  # [n, g, 1, c, dk]
    written = rows.in_chunks(value.to(dtype) * step[..., None])
    total = rows.in_chunks((step * rate)[..., None]).squeeze(-1).cumsum(-1)  # [n, g, r, c]
    num_chunk = total.size(-1)
    is_future = torch.ones(num_chunk, num_chunk, dtype=torch.bool, device=value.device).triu(1)
    # Masked before the exponential, which would overflow in the unused part.
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(is_future, float("-inf")).exp()
    within = ((q @ k.mT) * decay) @ written
    read = q * total.exp()[..., None]
    remaining = total[..., -1:, None]  # [n, g, r, 1, 1]
    updates = (k * (remaining - total[..., None]).exp()).mT @ written

    outputs = []
    state: Tensor | None = None
    first = 0
    for count in rows.chunks_of_step:
        here = slice(first, first + count)
        if state is None:
            outputs.append(within[here])
            state = updates[here]
        else:
            state = state[:count]
            outputs.append(within[here] + read[here] @ state)
            state = remaining[here].exp() * state + updates[here]
        first += count
    if not outputs:
        return value
    return (rows.in_order(outputs) + skip[..., None] * value).to(value.dtype)
