"""Rotary position embedding of packed sequences (RoFormer, arXiv 2104.09864), without a stop of the host.

megatron-core splits packed tokens by sequence in every layer, for which the host must wait for the lengths each time;
here the angles of all tokens are looked up once a micro-batch, on the device, and kept on its ``PackedSeqParams``.

Shapes: t = tokens of this rank, h = heads, d = head dimension, r = rotated dimensions (r <= d).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.packed_seq_params import PackedSeqParams


class RotaryTables(NamedTuple):
    """cos and sin of every token's angles, each fp32 [t, r / 2]."""

    cos: Tensor
    sin: Tensor


def packed_positions(cu_seqlens: Tensor, num_tokens: int, *, cp_rank: int = 0, cp_size: int = 1) -> Tensor:
    """Position of each token of this rank in its own sequence, int64 [num_tokens].

    Args:
        cu_seqlens: [n + 1], cumulative full lengths, each a multiple of 2 * cp_size when that is above 1.
        num_tokens: tokens of this rank, padding included.
        cp_rank: this rank holds chunks ``cp_rank`` and ``2 * cp_size - 1 - cp_rank`` of every sequence (zigzag).
        cp_size: context-parallel ranks.
    """
    local = cu_seqlens.long() // cp_size
    index = torch.arange(num_tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(local[1:], index, right=True).clamp_(max=local.numel() - 2)
    start = local[sequence]
    offset = index - start
    if cp_size == 1:
        return offset
    chunk = (local[sequence + 1] - start) // 2
    is_first = offset < chunk
    return torch.where(is_first, cp_rank * chunk, (2 * cp_size - 2 - cp_rank) * chunk) + offset


def rotary_tables(
    params: PackedSeqParams, freqs: Tensor, num_tokens: int, *, cp_rank: int, cp_size: int, interleaved: bool,
    mscale: float = 1.0,
) -> RotaryTables:  # fmt: skip
    """The tables of a micro-batch, computed by its first layer and kept on ``params`` for the others.

    Args:
        params: of the micro-batch; lengths over all context-parallel ranks.
        freqs: megatron-core's angles by position, [longest, 1, 1, r], each twice: side by side when ``interleaved``,
            else as two halves.
        num_tokens: tokens of this rank.
        cp_rank: rank in the context-parallel group.
        cp_size: size of the group.
        interleaved: which dimensions are rotated together: (0, 1), (2, 3), ... or (0, r / 2), (1, r / 2 + 1), ...
        mscale: factor on cos and sin (YaRN).
    """
    kept: Any = params
    tables: RotaryTables | None = getattr(kept, "rotary_tables", None)
    if tables is None:
        cu_seqlens = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        positions = packed_positions(cu_seqlens, num_tokens, cp_rank=cp_rank, cp_size=cp_size)
        angles = freqs.flatten(1)
        angles = angles[:, ::2] if interleaved else angles[:, : angles.size(1) // 2]
        # Padding behind the last sequence may lie beyond the longest one: its angle does not matter.
        angles = angles.float()[positions.clamp_(max=angles.size(0) - 1)]
        tables = RotaryTables(angles.cos() * mscale, angles.sin() * mscale)
        kept.rotary_tables = tables
    return tables


def apply_rotary(x: Tensor, tables: RotaryTables, *, interleaved: bool) -> Tensor:
    """Rotate the first r dimensions of every head; the others pass.

    Args:
        x: [t, h, d].
        tables: cos and sin, [t, r / 2].
        interleaved: as in :func:`rotary_tables`.

    Returns:
        [t, h, d] in the dtype of ``x``; computed in fp32 (fp64 for fp64).  The gradient is the inverse rotation.
    """
    if x.is_cuda and x.dtype != torch.float64:
        return _Rotation.apply(x, tables.cos, tables.sin, interleaved)
    return rotate(x, tables.cos, tables.sin, interleaved=interleaved)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """:func:`apply_rotary` in plain torch, on any device."""
    width = 2 * cos.size(1)
    dtype = torch.promote_types(x.dtype, torch.float32)
    turned, rest = x[..., :width].to(dtype), x[..., width:]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    cos, sin = cos[:, None].to(dtype), sin[:, None].to(dtype)
    parts = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


class _Rotation(torch.autograd.Function):
    """One kernel each way; nothing but the tables is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        from slime.backends.megatron_utils.layers.kernels.rotary import launch_rotation

        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return launch_rotation(x, cos, sin, interleaved=interleaved, inverse=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from slime.backends.megatron_utils.layers.kernels.rotary import launch_rotation

        cos, sin = ctx.saved_tensors
        return launch_rotation(grads[0], cos, sin, interleaved=ctx.interleaved, inverse=True), None, None, None
