"""Rotary position embedding of packed sequences (RoFormer, arXiv 2104.09864), without host synchronization.

megatron-core splits packed tokens by sequence in every layer, and each time the host waits for the lengths.  Here the
angles of all tokens are looked up on the device once per micro-batch and cached on its ``PackedSeqParams``.

Shapes: t = tokens of this rank, h = heads, d = head dimension, r = rotated dimensions (r <= d).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime.train_data.context_parallel import CPRank, slice_zigzag


class RotaryTables(NamedTuple):
    """cos and sin of every token's angles, each fp32 [t, r / 2]."""

    cos: Tensor
    sin: Tensor


def cumulative_lengths(packed_seq_params: Any) -> Tensor:
    """Return the packing's cumulative lengths [S + 1] over all context-parallel ranks, padding included."""
    padded = packed_seq_params.cu_seqlens_q_padded
    return packed_seq_params.cu_seqlens_q if padded is None else padded


def kept_on(packed_seq_params: Any, name: str, make: Callable[[], Any]) -> Any:
    """Call ``make`` in the first layer of a micro-batch; cache the result as attribute ``name`` for later layers."""
    kept = vars(packed_seq_params)
    if name not in kept:
        kept[name] = make()
    return kept[name]


def natural_order(packed_seq_params: Any, cp_size: int) -> Tensor:
    """Return [T], the index of each token of the stream in the ranks' concatenated parts; cached on its argument."""

    def make() -> Tensor:
        cu = cumulative_lengths(packed_seq_params)
        return zigzag_places(cu.tolist(), cp_size).to(cu.device)

    return kept_on(packed_seq_params, "natural_order", make)


def zigzag_places(offsets: list[int], cp_size: int) -> Tensor:
    """Return :func:`natural_order` for sequences that start at ``offsets`` (the last entry is the end); each length is
    a multiple of 2 * cp_size.
    """
    parts = [
        slice_zigzag(torch.arange(begin, end), CPRank(rank, cp_size))
        for rank in range(cp_size)
        for begin, end in itertools.pairwise(offsets)
    ]
    return torch.cat(parts).argsort()


def packed_positions(cu_seqlens: Tensor, num_tokens: int, cp: CPRank) -> Tensor:
    """Return the position of each token of this rank in its own sequence, int64 [num_tokens].

    Args:
        cu_seqlens: [n + 1] cumulative lengths of whole sequences, each a multiple of 2 * cp.size if cp.size > 1.
        cp: this rank, which holds two chunks of every sequence (zigzag).
    """
    local = cu_seqlens.long() // cp.size
    index = torch.arange(num_tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(local[1:], index, right=True).clamp_(max=local.numel() - 2)
    start = local[sequence]
    offset = index - start
    if cp.size == 1:
        return offset
    chunk = (local[sequence + 1] - start) // 2
    is_first = offset < chunk
    return torch.where(is_first, cp.rank * chunk, (2 * cp.size - 2 - cp.rank) * chunk) + offset


def rotary_tables(
    params: PackedSeqParams, freqs: Tensor, num_tokens: int, cp: CPRank, *, interleaved: bool,
    mscale: float = 1.0, name: str = "rotary_tables",
) -> RotaryTables:  # fmt: skip
    """Return the tables of a micro-batch; the first layer computes them and caches them on ``params``.

    Args:
        params: packing of the micro-batch, with lengths over all context-parallel ranks.
        freqs: megatron-core's angles by position, [longest, 1, 1, r], each twice: adjacent if ``interleaved``, else in
            two halves.
        interleaved: rotate the dimension pairs (0, 1), (2, 3), ... instead of (0, r / 2), (1, r / 2 + 1), ...
        mscale: factor on cos and sin (YaRN).
        name: attribute of ``params`` that caches the tables.
    """

    def make() -> RotaryTables:
        positions = packed_positions(cumulative_lengths(params), num_tokens, cp)
        angles = freqs.flatten(1)
        angles = angles[:, ::2] if interleaved else angles[:, : angles.size(1) // 2]
        # Positions of padding after the last sequence may exceed the table; their angles do not matter.
        angles = angles.float()[positions.clamp_(max=angles.size(0) - 1)]
        return RotaryTables(angles.cos() * mscale, angles.sin() * mscale)

    return kept_on(params, name, make)


def apply_rotary(x: Tensor, tables: RotaryTables, *, interleaved: bool) -> Tensor:
    """Rotate the first r dimensions of every head; the others stay unchanged.

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
    """Apply :func:`apply_rotary` in plain torch, on any device."""
    width = 2 * cos.size(1)
    # Cast before the products, so that the two parts of the gradient are also added in fp32.
    wide = x[..., :width].to(torch.promote_types(x.dtype, torch.float32))
    rotated = rotate_pairs(wide, cos[:, None], sin[:, None], interleaved=interleaved)
    if interleaved:
        rotated = torch.stack(rotated.chunk(2, dim=-1), dim=-1).flatten(-2)
    return torch.cat([rotated.to(x.dtype), x[..., width:]], dim=-1)


class _Rotation(torch.autograd.Function):
    """One kernel each for forward and backward; saves only the tables."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        from slime.backends.megatron_utils.layers.rotary_kernels import launch_rotation

        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return launch_rotation(x, cos, sin, interleaved=interleaved, inverse=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from slime.backends.megatron_utils.layers.rotary_kernels import launch_rotation

        cos, sin = ctx.saved_tensors
        return launch_rotation(grads[0], cos, sin, interleaved=ctx.interleaved, inverse=True), None, None, None


# Rotary positions of multi-latent attention, plain or stretched by YaRN (arXiv 2309.00071).
#
# Only the last dimensions of each head are rotated, in interleaved pairs.  The numbers equal those of the DeepSeek-V3
# model in transformers; a test compares them.


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's ``mscale``, the factor on cosines and sines of stretched positions; 1 without stretching."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


@dataclass(frozen=True)
class LatentRotary:
    """Angles, their magnitude, and the softmax scale that goes with them."""

    width: int
    """Number of rotated dimensions of a head."""
    base: float
    factor: float = 1.0
    """Stretch of the positions beyond the original length; 1 is plain rotary."""
    original_length: int = 4096
    """Longest position before stretching."""
    beta_fast: float = 32.0
    """Pairs with more rotations than this over the original length are not stretched."""
    beta_slow: float = 1.0
    """Pairs with fewer rotations than this are stretched by the whole factor."""
    mscale: float = 1.0
    """Affects :attr:`magnitude`."""
    mscale_all_dim: float = 0.0
    """Affects :attr:`magnitude` and :meth:`softmax_scale`."""

    @classmethod
    def from_config(cls, config: Any) -> LatentRotary:
        """Read the settings from an MLATransformerConfig."""
        return cls(
            width=config.qk_pos_emb_head_dim,
            base=config.rotary_base,
            factor=config.rotary_scaling_factor if config.rope_type == "yarn" else 1.0,
            original_length=config.original_max_position_embeddings,
            beta_fast=config.beta_fast,
            beta_slow=config.beta_slow,
            mscale=config.mscale,
            mscale_all_dim=config.mscale_all_dim,
        )

    @property
    def magnitude(self) -> float:
        if self.mscale and self.mscale_all_dim:
            return yarn_magnitude(self.factor, self.mscale) / yarn_magnitude(self.factor, self.mscale_all_dim)
        return yarn_magnitude(self.factor)

    def softmax_scale(self, head_width: int) -> float:
        """Return the softmax scale of heads with ``head_width`` dimensions, rotated and unrotated ones together."""
        return head_width**-0.5 * yarn_magnitude(self.factor, self.mscale_all_dim) ** 2

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """Return [width / 2] radians per position, fp32."""
        powers = self.base ** (torch.arange(0, self.width, 2, dtype=torch.float32, device=device) / self.width)
        if self.factor <= 1:
            return 1.0 / powers
        low = max(math.floor(self._pair_with_rotations(self.beta_fast)), 0)
        high = min(math.ceil(self._pair_with_rotations(self.beta_slow)), self.width - 1)
        # As in transformers, the ramp has a small width even if both ends coincide.
        span = high - low if high != low else 0.001
        index = torch.arange(self.width // 2, dtype=torch.float32, device=device)
        stretched = ((index - low) / span).clamp(0, 1)
        return stretched / (self.factor * powers) + (1 - stretched) / powers

    def _pair_with_rotations(self, rotations: float) -> float:
        """Return the fractional index of the pair that makes ``rotations`` turns over the original length."""
        return self.width * math.log(self.original_length / (rotations * 2 * math.pi)) / (2 * math.log(self.base))

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [n, width / 2] of n positions, fp32, times :attr:`magnitude`."""
        angles = positions.float()[:, None] * self.frequencies(positions.device)
        return angles.cos() * self.magnitude, angles.sin() * self.magnitude


def rotate_pairs(x: Tensor, cosines: Tensor, sines: Tensor, *, interleaved: bool = True) -> Tensor:
    """Rotate the pairs of the last dimension: (0, 1), (2, 3), ... or, not interleaved, (0, d / 2), (1, d / 2 + 1), ...

    In the result the first members of all pairs precede the second members, whatever the input order.  Dot products of
    two results do not depend on the order.

    Args:
        x: [..., d].
        cosines, sines: [..., d / 2], fp32, broadcast against the pairs.
        interleaved: the first of the two pairings above.

    Returns:
        [..., d] in the dtype of ``x``; computed in the wider of its dtype and fp32.
    """
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    rotated = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
    return rotated.to(x.dtype)
