"""Sequence packing of a micro-batch: concatenated sequences, with offsets that keep their attention separate.

Shapes: T = tokens of the micro-batch on this rank, including padding; S = sequences; R = tokens of one response.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.train_data.context_parallel import CPRank, local_length, slice_zigzag


@dataclass(frozen=True, slots=True)
class PackingConfig:
    """How a rank packs its micro-batches."""

    cp: CPRank = CPRank()
    pad_multiple: int = 1
    """T is padded to a multiple of this; usually tensor-parallel size times ``--data-pad-size-multiplier``."""
    layout: Literal["zigzag", "allgather"] = "zigzag"
    """What each context-parallel rank gets: two chunks of every sequence, or a contiguous part of the whole stream."""


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """The tokens of a micro-batch on one rank.  Padding after the last sequence forms a sequence of its own."""

    tokens: Tensor
    """[1, T] int64."""
    cu_seqlens: Tensor
    """[S + 1] int32 offsets of the sequences in the stream over all context-parallel ranks; [S + 2] with padding."""
    max_seqlen: int
    """Longest distance between two offsets, including padding."""
    num_real_tokens: int
    """Tokens of the sequences over all context-parallel ranks, excluding padding."""


def pack_thd(sequences: Sequence[Tensor], packing: PackingConfig, *, pad_id: int = 0) -> PackedTokens:
    """Pack sequences for variable-length attention.

    Zigzag: each sequence is cut separately, and this rank's stream is padded to a multiple of ``pad_multiple``, and of
    2 with context parallelism.  All-gather: the stream of whole sequences is padded to a multiple of
    ``cp.size * pad_multiple``, and this rank takes its contiguous part.  In both layouts ``cu_seqlens`` counts the
    tokens of all ranks, as attention kernels expect.

    Args:
        sequences: [L] token ids each, on one device.
        packing: This rank's packing.
        pad_id: Token id of the padding.
    """
    assert sequences, "a micro-batch has at least one sequence"
    cp, num_real_tokens = packing.cp, sum(map(len, sequences))
    if packing.layout == "allgather":
        lengths = [len(sequence) for sequence in sequences]
        stream = _pad_to(torch.cat(list(sequences)), cp.size * packing.pad_multiple, pad_id)
        cu_seqlens = _offsets(lengths, len(stream), 1, stream.device)
        stream = stream.chunk(cp.size)[cp.rank]
    else:
        pieces = [slice_zigzag(sequence, cp, pad_value=pad_id) for sequence in sequences]
        stream = _pad_to(torch.cat(pieces), _zigzag_multiple(packing), pad_id)
        cu_seqlens = _offsets([len(piece) for piece in pieces], len(stream), cp.size, stream.device)
    max_seqlen = int(cu_seqlens.diff().max())
    return PackedTokens(stream.unsqueeze(0), cu_seqlens, max_seqlen, num_real_tokens)


def packed_length(lengths: Sequence[int], packing: PackingConfig) -> int:
    """Return T of :func:`pack_thd` for sequences with the given lengths."""
    if packing.layout == "allgather":
        return math.ceil(sum(lengths) / (packing.cp.size * packing.pad_multiple)) * packing.pad_multiple
    multiple = _zigzag_multiple(packing)
    return math.ceil(sum(local_length(length, packing.cp.size) for length in lengths) / multiple) * multiple


def _zigzag_multiple(packing: PackingConfig) -> int:
    """Return the multiple to pad to; even with CP, because the padding is a sequence with two chunks per rank."""
    return packing.pad_multiple if packing.cp.size == 1 else math.lcm(packing.pad_multiple, 2)


def align_loss_masks(
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    packing: PackingConfig,
) -> Tensor:
    """Return [1, T] loss masks aligned with the logits.

    Position p holds the mask of token p + 1; prompt and padding are 0.

    Args:
        loss_masks: [R] each, not sliced by context parallelism.
        total_lengths: Number of tokens of each sample.
        response_lengths: R of each sample.
        packing: See :func:`pack_thd`.
    """
    aligned: list[Tensor] = []
    for mask_R, total, response in zip(loss_masks, total_lengths, response_lengths, strict=True):
        if len(mask_R) != response or response >= total:
            raise ValueError(f"loss mask of {len(mask_R)} for a response of {response} of {total} tokens")
        aligned.append(F.pad(mask_R, (total - response - 1, 1)))
    return pack_thd(aligned, packing).tokens


def take_micro_batch(rank_data: Mapping[str, Any], indices: Sequence[int], keys: Sequence[str]) -> dict[str, Any]:
    """Return the entries at ``indices`` for each of ``keys``; None for keys that the data does not have."""
    batch: dict[str, Any] = {}
    for key in keys:
        values = rank_data.get(key)
        if isinstance(values, Tensor):
            batch[key] = values[torch.as_tensor(list(indices), device=values.device)]
        else:
            batch[key] = None if values is None else [values[index] for index in indices]
    return batch


def _pad_to(stream: Tensor, multiple: int, pad_id: int) -> Tensor:
    return F.pad(stream, (0, math.ceil(len(stream) / multiple) * multiple - len(stream)), value=pad_id)


def _offsets(lengths: Sequence[int], padded_length: int, scale: int, device: torch.device) -> Tensor:
    offsets = [0, *itertools.accumulate(lengths)]
    if offsets[-1] < padded_length:
        offsets.append(padded_length)
    return torch.tensor([offset * scale for offset in offsets], dtype=torch.int32, device=device)
