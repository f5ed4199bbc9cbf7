"""The gated delta rule (Gated Delta Networks, arXiv 2412.06464) over packed sequences.

A head's state S [dk, dv] starts at zero in every sequence.  With unit keys k_t, log decays g_t <= 0 and write
strengths 0 < b_t < 1, each token decays the state, replaces the value under its key, and reads:

    S_t = exp(g_t) S_(t-1) + b_t k_t (v_t - exp(g_t) S_(t-1)^T k_t)^T
    o_t = S_t^T q_t / sqrt(dk)

Token by token this is slow.  Within a chunk let G_i be the sum of the log decays up to token i.  What the tokens write
solves a triangular system (the WY representation), which is linear in the state before the chunk:

    (I + L) X = b V - (b exp(G) K) S        L_ij = b_i exp(G_i - G_j) k_i . k_j for j < i, else 0
    O = exp(G) Q S + (Q K^T exp(G_i - G_j), j <= i) X
    S' = exp(G_C) S + (exp(G_C - G) K)^T X

So the work within a chunk is matrix products, and only the chunks are sequential.

Shapes: t = tokens, h = key heads, r = value heads of a key head, dk and dv = widths of keys and values, n = chunks of
c tokens, m = sequences that still have chunks.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from slime_plugins.models.qwen3_next.packed_rows import PackedRows

Kernel = Callable[..., tuple[Tensor, Tensor | None]]
"""``chunk_gated_delta_rule`` of ``fla``: outputs [1, t, heads, dv] and the last state."""
UNIT_EPSILON = 1e-6
"""Added to the squared length of a query or key before it is made a unit vector."""


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, rows: PackedRows
) -> Tensor:
    """Return [t, h, r, dv] in the dtype of ``value``, with ``fla``'s kernels on CUDA in bf16 or fp16, otherwise with
    :func:`chunked_delta_rule`.

    Args:
        query, key: [t, h, dk], normalized to unit vectors here.
        value: [t, h, r, dv]
        log_decay: [t, h, r], at most 0, fp32.
        strength: [t, h, r], between 0 and 1.
        rows: the packing.
    """
    kernel = fla_kernel() if value.is_cuda and value.dtype in (torch.bfloat16, torch.float16) else None
    if kernel is None:
        return chunked_delta_rule(query, key, value, log_decay, strength, rows)
    return by_kernel(kernel, query, key, value, log_decay, strength, rows)


def by_kernel(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, rows: PackedRows
) -> Tensor:
    """Run :func:`gated_delta_rule` with a kernel that needs a batch of one, and as many key heads as value heads."""
    repeats = value.size(2)
    out, _ = kernel(
        q=query.repeat_interleave(repeats, dim=1)[None],
        k=key.repeat_interleave(repeats, dim=1)[None],
        v=value.flatten(1, 2)[None],
        g=log_decay.flatten(1)[None],
        beta=strength.to(value.dtype).flatten(1)[None],
        cu_seqlens=rows.cu_seqlens,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0].unflatten(1, value.shape[1:3])


@functools.cache
def fla_kernel() -> Kernel | None:
    """Return the Triton kernels of flash-linear-attention; None if the package is not installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule


def chunked_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, rows: PackedRows
) -> Tensor:
    """Run :func:`gated_delta_rule` in plain torch, on any device."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    q, k = (rows.in_chunks(unit(x.to(dtype)))[:, :, None] for x in (query, key))  # [n, h, 1, c, dk]
    q = q * query.size(-1) ** -0.5
    v, g, b = (rows.in_chunks(x.to(dtype)) for x in (value, log_decay[..., None], strength[..., None]))
    total = g.squeeze(-1).cumsum(-1)  # [n, h, r, c]
    num_chunk = total.size(-1)
    is_future = torch.ones(num_chunk, num_chunk, dtype=torch.bool, device=value.device).triu(1)
    # Masked before the exponential, which would overflow in the unused part.
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(is_future, float("-inf")).exp()
    lower = (b * (k @ k.mT) * decay).tril(-1)
    shrunk = total.exp()[..., None]
    # Solve both right-hand sides at once: the part that does not depend on the state, and the part that does.
    sides = torch.cat([b * v, b * shrunk * k], dim=-1)
    solved = torch.linalg.solve_triangular(lower, sides, upper=False, unitriangular=True)
    written, from_state = solved.split([value.size(-1), key.size(-1)], dim=-1)
    scores = (q @ k.mT) * decay
    read = q * shrunk
    remaining = total[..., -1:, None]  # [n, h, r, 1, 1]
    kept_keys = k * (remaining - total[..., None]).exp()

    outputs = []
    state: Tensor | None = None
    first = 0
    for count in rows.chunks_of_step:
        step = slice(first, first + count)
        new = written[step]
        out = scores[step] @ new
        update = kept_keys[step].mT
        if state is None:
            state = update @ new
        else:
            state = state[:count]
            correction = from_state[step] @ state
            new = new - correction
            out = scores[step] @ new + read[step] @ state
            state = remaining[step].exp() * state + update @ new
        outputs.append(out)
        first += count
    if not outputs:
        return value
    return rows.in_order(outputs).to(value.dtype)


def unit(x: Tensor) -> Tensor:
    """Normalize the vectors of the last dimension to length one (a little less if they are tiny)."""
    return x * (x.square().sum(-1, keepdim=True) + UNIT_EPSILON).rsqrt()
