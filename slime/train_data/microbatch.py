"""One micro-batch as packed tokens: sequences one after the other, with the offsets that keep attention apart.

Shapes: T = tokens of the micro-batch on this rank, padding included; S = sequences; R = tokens of one response.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.train_data.context_parallel import local_length, slice_zigzag

CPLayout = Literal["zigzag", "allgather"]


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """The tokens of a micro-batch on one rank; padding after the last sequence is a sequence of its own."""

    tokens: Tensor
    """[1, T] int64."""
    cu_seqlens: Tensor
    """[S + 1] int32 offsets of the sequences in the stream of all context-parallel ranks together; one more when
    padding follows."""
    max_seqlen: int
    """Longest sequence between two offsets, padding included."""
    num_real_tokens: int
    """Tokens of the sequences on all context-parallel ranks together, no padding."""


def pack_thd(
    sequences: Sequence[Tensor],
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
    pad_multiple: int = 1,
    pad_id: int = 0,
    layout: CPLayout = "zigzag",
) -> PackedTokens:
    """Pack sequences for variable-length attention.

    Zigzag: each sequence is cut on its own, and this rank's stream is padded to a multiple of ``pad_multiple``.
    All-gather: the stream of whole sequences is padded to a multiple of ``cp_size * pad_multiple``, and this rank
    takes its contiguous part.  Either way ``cu_seqlens`` counts tokens of all ranks, as attention kernels expect.

    Args:
        sequences: [L] token ids each, on one device.
        cp_rank: this context-parallel rank.
        cp_size: number of them.
        pad_multiple: usually tensor-parallel size times ``--data-pad-size-multiplier``.
        pad_id: token id of the padding.
        layout: way in which context parallelism cuts.
    """
    assert sequences, "a micro-batch has at least one sequence"
    num_real_tokens = sum(map(len, sequences))
    if layout == "allgather":
        lengths = [len(sequence) for sequence in sequences]
        stream = _pad_to(torch.cat(list(sequences)), cp_size * pad_multiple, pad_id)
        cu_seqlens = _offsets(lengths, len(stream), 1, stream.device)
        stream = stream.chunk(cp_size)[cp_rank]
    else:
        pieces = [slice_zigzag(s, cp_rank=cp_rank, cp_size=cp_size, pad_value=pad_id) for s in sequences]
        stream = _pad_to(torch.cat(pieces), _zigzag_multiple(pad_multiple, cp_size), pad_id)
        cu_seqlens = _offsets([len(piece) for piece in pieces], len(stream), cp_size, stream.device)
    max_seqlen = int(cu_seqlens.diff().max())
    return PackedTokens(stream.unsqueeze(0), cu_seqlens, max_seqlen, num_real_tokens)


def packed_length(
    lengths: Sequence[int], *, cp_size: int = 1, pad_multiple: int = 1, layout: CPLayout = "zigzag"
) -> int:
    """Return T of :func:`pack_thd` for sequences of these lengths."""
    if layout == "allgather":
        return math.ceil(sum(lengths) / (cp_size * pad_multiple)) * pad_multiple
    multiple = _zigzag_multiple(pad_multiple, cp_size)
    return math.ceil(sum(local_length(length, cp_size) for length in lengths) / multiple) * multiple


def _zigzag_multiple(pad_multiple: int, cp_size: int) -> int:
    """Return the multiple of the padded length: padding is a sequence of its own, which has two chunks a rank too."""
    return pad_multiple if cp_size == 1 else math.lcm(pad_multiple, 2)


def align_loss_masks(
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
    pad_multiple: int = 1,
    layout: CPLayout = "zigzag",
) -> Tensor:
    """Return [1, T] loss masks moved under the logits.

    Position p holds the mask of token p + 1; prompt and padding are 0.

    Args as in ``pack_thd``; ``loss_masks`` are [R], whole whatever the context parallelism.
    """
    aligned: list[Tensor] = []
    for mask_R, total, response in zip(loss_masks, total_lengths, response_lengths, strict=True):
        if len(mask_R) != response or response >= total:
            raise ValueError(f"loss mask of {len(mask_R)} for a response of {response} of {total} tokens")
        aligned.append(F.pad(mask_R, (total - response - 1, 1)))
    return pack_thd(
        aligned, cp_rank=cp_rank, cp_size=cp_size, pad_multiple=pad_multiple, pad_id=0, layout=layout
    ).tokens


def take_micro_batch(rank_data: Mapping[str, Any], indices: Sequence[int], keys: Sequence[str]) -> dict[str, Any]:
    """Return the entries of the samples at ``indices`` in each of ``keys``; a key that the data lacks gives None."""
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
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    if offsets[-1] < padded_length:
        offsets.append(padded_length)
    return torch.tensor([offset * scale for offset in offsets], dtype=torch.int32, device=device)
