"""Indices of packed tokens in the chunks of the delta rule and in the input of the convolution.

A micro-batch is one stream of T tokens, its sequences concatenated.  Both operations look back, but must not see the
previous sequence: chunks restart with each sequence, and in the convolution's input K - 1 rows of zeros precede each
sequence.  The index tensors are built once per micro-batch.

Shapes: T tokens, S sequences, N chunks of C tokens, K = width of the convolution.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.layers.rotary import cumulative_lengths, kept_on

CHUNK = 64
"""Tokens per chunk: small enough that the quadratic work is less than the products with the state."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Index tensors of one micro-batch; T means "no token", a row of zeros after the last one."""

    chunk_tokens: Tensor
    """[N, C] the tokens of each chunk: the first chunks of all sequences, then the second ones, and so on."""
    chunk_places: Tensor
    """[T] index of each token in ``chunk_tokens``, flattened."""
    chunks_of_step: tuple[int, ...]
    """Number of sequences with a first chunk, a second one, ...; in each step the longest sequences come first."""
    conv_tokens: Tensor
    """[T + S (K - 1)] the input rows of the convolution."""
    conv_places: Tensor
    """[T] the output row of each token."""
    cu_seqlens: Tensor
    """[S + 1] int64 cumulative lengths."""

    @classmethod
    def from_offsets(
        cls, offsets: Sequence[int], *, conv_width: int, device: torch.device | None = None, chunk: int = CHUNK
    ) -> PackedRows:
        """Args:
        offsets: [S + 1] where each sequence begins, and the end; sequences without tokens are left out.
        conv_width: K.
        device: of the tensors.
        chunk: C.
        """
        sequences = [(begin, end) for begin, end in itertools.pairwise(offsets) if end > begin]
        num_tokens = offsets[-1]
        longest_first = sorted(sequences, key=lambda sequence: sequence[0] - sequence[1])
        rows, chunks_of_step, step = [], [], 0
        while active := [(begin, end) for begin, end in longest_first if end - begin > step * chunk]:
            for begin, end in active:
                token = torch.arange(begin + step * chunk, begin + (step + 1) * chunk)
                rows.append(token.where(token < end, num_tokens))
            chunks_of_step.append(len(active))
            step += 1
        chunk_tokens = torch.stack(rows) if rows else torch.zeros(0, chunk, dtype=torch.int64)
        flat = chunk_tokens.flatten()
        is_token = flat < num_tokens
        chunk_places = torch.empty(num_tokens, dtype=torch.int64)
        chunk_places[flat[is_token]] = is_token.nonzero().flatten()
        gap = torch.full((conv_width - 1,), num_tokens)
        pieces = [piece for begin, end in sequences for piece in (gap, torch.arange(begin, end))]
        conv_tokens = torch.cat(pieces) if pieces else gap[:0]
        # Output row p is computed from the input rows p .. p + K - 1, the last of which is the token itself.
        gaps_before = torch.arange(len(sequences)) * (conv_width - 1)
        lengths = torch.tensor([end - begin for begin, end in sequences], dtype=torch.int64)
        conv_places = torch.arange(num_tokens) + gaps_before.repeat_interleave(lengths)
        starts = torch.tensor([*(begin for begin, _ in sequences), num_tokens])
        return cls(
            chunk_tokens=chunk_tokens.to(device),
            chunk_places=chunk_places.to(device),
            chunks_of_step=tuple(chunks_of_step),
            conv_tokens=conv_tokens.to(device),
            conv_places=conv_places.to(device),
            cu_seqlens=starts.to(device),
        )

    @classmethod
    def of(cls, packed_seq_params: Any, conv_width: int) -> PackedRows:
        """Return the index tensors of a micro-batch, built once (which synchronizes with the device) and cached on its
        ``packed_seq_params``.
        """

        def make() -> PackedRows:
            cu = cumulative_lengths(packed_seq_params)
            return cls.from_offsets(cu.tolist(), conv_width=conv_width, device=cu.device)

        return kept_on(packed_seq_params, "packed_rows", make)

    def in_chunks(self, x: Tensor) -> Tensor:
        """Map [T, ..., d] to [N, ..., C, d]; missing tokens are zeros."""
        return rows_or_zeros(x, self.chunk_tokens).movedim(1, -2)

    def in_order(self, chunks: Sequence[Tensor]) -> Tensor:
        """Map the chunks [N, h, r, C, d] of all steps to the tokens [T, h, r, d]."""
        return torch.cat(list(chunks)).permute(0, 3, 1, 2, 4).flatten(0, 1).index_select(0, self.chunk_places)


def rows_or_zeros(x: Tensor, index: Tensor) -> Tensor:
    """Select ``x[index]`` along the first dimension; the index after the last row gives zeros."""
    padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return padded.index_select(0, index.flatten()).unflatten(0, index.shape)
