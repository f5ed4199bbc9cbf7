"""Where the tokens of a packed micro-batch stand: the whole stream, cut contiguously over the ranks.

A micro-batch is one stream of T tokens, sequence after sequence.  Context-parallel rank r of c holds the r-th of c
equal parts of it; under sequence parallelism each tensor-parallel rank holds an equal part of that.  Keys are named by
their position in the whole stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedStream:
    """The sequences of one micro-batch, on the host and on the device."""

    offsets: tuple[int, ...]
    """[S + 1] where each sequence begins, and the end; padding is a sequence of its own."""
    start_T: Tensor
    """[T] int64: the first token of the sequence that each token belongs to."""

    @classmethod
    def from_offsets(cls, cu_seqlens: Tensor) -> PackedStream:
        """From cumulative lengths [S + 1] over all context-parallel ranks; waits for the device once."""
        offsets = cu_seqlens.tolist()
        lengths = torch.tensor([end - start for start, end in zip(offsets, offsets[1:], strict=False)])
        start_T = torch.tensor(offsets[:-1]).repeat_interleave(lengths)
        return cls(tuple(offsets), start_T.to(cu_seqlens.device))

    @classmethod
    def of(cls, packed_seq_params: Any) -> PackedStream:
        """That of a micro-batch; made once and kept on megatron-core's description of it."""
        cached = vars(packed_seq_params).get("packed_stream")
        if cached is None:
            padded = packed_seq_params.cu_seqlens_q_padded
            cached = cls.from_offsets(packed_seq_params.cu_seqlens_q if padded is None else padded)
            packed_seq_params.packed_stream = cached
        return cached

    @property
    def num_tokens(self) -> int:
        return self.offsets[-1]

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return max(end - start for start, end in self.sequences())

    def sequences(self) -> list[tuple[int, int]]:
        """(start, end) of every sequence."""
        return list(zip(self.offsets, self.offsets[1:], strict=False))

    def positions(self, first: int, count: int) -> Tensor:
        """[count] position in its own sequence of each token from ``first`` on."""
        token = torch.arange(first, first + count, device=self.start_T.device)
        return token - self.start_T[first : first + count]
