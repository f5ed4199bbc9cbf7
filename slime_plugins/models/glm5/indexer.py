"""Selects the keys: the lightning indexer of DeepSeek-V3.2 (arXiv 2512.02556, section 2.1).

A small separate attention scores every earlier key of the sequence, and the row attends to the top ``topk``:

    score[t, s] = sum over h of weight[t, h] * relu(query[t, h] . key[s])

No gradient flows through the selection or back into the model.

Shapes: t = rows of this rank, h = indexer heads, d = head width, s = keys of the whole stream, k = selected keys.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.layers.rotary import cumulative_lengths, kept_on, rotate_pairs

_BLOCK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}
"""Number of scores computed at a time; 2^27 take half a gigabyte."""


@dataclass(frozen=True, slots=True)
class IndexerSettings:
    """Sizes of the indexer, from the HF config."""

    num_heads: int
    head_dim: int
    topk: int
    is_interleaved: bool
    """Rotary pairs are (0, 1), (2, 3), ... instead of (0, d / 2), (1, d / 2 + 1), ..."""


def rotate_last(x: Tensor, cosines: Tensor, sines: Tensor, *, is_interleaved: bool) -> Tensor:
    """Rotate the last dimensions of every head.

    The order of the rotated dimensions may change; dot products of two results do not depend on it.

    Args:
        x: [t, ..., d]
        cosines, sines: [t, r / 2], fp32; the last r dimensions of x are rotated.
        is_interleaved: see :class:`IndexerSettings`.
    """
    width = 2 * cosines.shape[-1]
    shape = (len(x), *([1] * (x.dim() - 2)), -1)
    plain, turning = x.split([x.shape[-1] - width, width], dim=-1)
    turned = rotate_pairs(turning, cosines.view(shape), sines.view(shape), interleaved=is_interleaved)
    return torch.cat([plain, turned], dim=-1)


@torch.no_grad()
def choose_keys(
    query: Tensor, weight: Tensor, key: Tensor, stream: PackedStream, *, first_row: int, topk: int
) -> Tensor:
    """Select keys: [t, k] int32 indices in the stream, -1 if a row has fewer; k = min(topk, longest).

    A row with at most ``topk`` keys (including its own) attends to all of them, and its scores are not computed, so
    for short sequences the indexer costs nothing.

    Args:
        query: [t, h, d]
        weight: [t, h] fp32, including all scales.
        key: [s, d]
        stream: the sequences; a row sees the keys of its sequence up to its own position.
        first_row: index of row 0 in the stream.
        topk: keys per row.
    """
    count, device = query.shape[0], query.device
    width = min(topk, stream.max_length)
    row = torch.arange(first_row, first_row + count, device=device)
    start = stream.start_T[first_row : first_row + count]
    indices = start[:, None] + torch.arange(width, device=device)
    indices = indices.masked_fill_(indices > row[:, None], -1).int()
    for begin, end in stream.sequences():
        rows_begin, rows_end = max(begin + topk, first_row), min(end, first_row + count)
        block = max(_BLOCK_ELEMENTS[device.type] // _elements_per_row(query, end - begin), 1)
        for first in range(rows_begin, rows_end, block):
            last = min(first + block, rows_end)
            local = slice(first - first_row, last - first_row)
            scores = index_scores(query[local], weight[local], key[begin:last])
            future = torch.arange(begin, last, device=device) > row[local][:, None]
            chosen = scores.masked_fill_(future, float("-inf")).topk(width, dim=-1, sorted=False).indices
            indices[local] = (chosen + begin).int()
    return indices


def index_scores(query: Tensor, weight: Tensor, key: Tensor) -> Tensor:
    """Compute [t, s] fp32: sum over h of ``weight[t, h] * relu(query[t, h] . key[s])``."""
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        from slime_plugins.models.glm5.sparse_kernels import index_scores_kernel

        return index_scores_kernel(query, weight, key)
    dots = torch.einsum("thd,sd->ths", query.float(), key.float()).relu_()
    return torch.einsum("ths,th->ts", dots, weight)


def _elements_per_row(query: Tensor, num_keys: int) -> int:
    """Return the scratch elements per row: the kernel keeps one score per key, plain torch one per key and head."""
    is_kernel = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    return num_keys * (1 if is_kernel else query.shape[1])


# Positions of the tokens of a packed micro-batch: the whole stream, cut contiguously over the ranks.
#
# A micro-batch is one stream of T tokens, its sequences concatenated.  Context-parallel rank r of c holds the r-th of
# c equal parts; under sequence parallelism each tensor-parallel rank holds an equal part of that.  Keys are identified
# by their index in the whole stream.


@dataclass(frozen=True, slots=True)
class PackedStream:
    """The sequences of one micro-batch, on the host and on the device."""

    offsets: tuple[int, ...]
    """[S + 1] start of each sequence, and the end of the last; padding is a separate sequence."""
    start_T: Tensor
    """[T] int64: the first token of each token's sequence."""

    @classmethod
    def from_offsets(cls, cu_seqlens: Tensor) -> PackedStream:
        """Build the stream from cumulative lengths [S + 1] over all context-parallel ranks; synchronizes once."""
        offsets = cu_seqlens.tolist()
        begins = torch.tensor(offsets)
        start_T = begins[:-1].repeat_interleave(begins.diff())
        return cls(tuple(offsets), start_T.to(cu_seqlens.device))

    @classmethod
    def of(cls, packed_seq_params: Any) -> PackedStream:
        """Return the stream of a micro-batch, built once and cached on its ``packed_seq_params``."""
        make = partial(cls.from_offsets, cumulative_lengths(packed_seq_params))
        return kept_on(packed_seq_params, "packed_stream", make)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole stream, including padding."""
        return self.offsets[-1]

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return max(end - start for start, end in self.sequences())

    def sequences(self) -> list[tuple[int, int]]:
        """Return (start, end) of every sequence."""
        return list(itertools.pairwise(self.offsets))

    def positions(self, first: int, count: int) -> Tensor:
        """Return [count]: the positions of the tokens from ``first`` on in their sequences."""
        token = torch.arange(first, first + count, device=self.start_T.device)
        return token - self.start_T[first : first + count]
