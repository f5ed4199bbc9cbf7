"""Index arithmetic for the tokens of a sequence on each context-parallel rank; rank and size are arguments.

Zigzag (the default): a sequence of length L is padded to ``2 * cp_size`` chunks of ``c = ceil(L / (2 * cp_size))``
tokens.  Rank r keeps chunks r and ``2 * cp_size - 1 - r``, so every rank has an equal share of causal attention.
All-gather: the packed stream of a micro-batch is cut into ``cp_size`` contiguous chunks.

The logit at position p predicts token p + 1, so the logits for a sample's response are at positions
``prompt_length - 1 ... total_length - 2``.

The collectives are in ``slime.backends.megatron_utils.cp_utils``.

Shapes: L = tokens of one sequence, R = tokens of its response, r = response tokens whose logits are on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Span = tuple[int, int]
"""Half-open interval of positions."""


@dataclass(frozen=True, slots=True)
class CPRank:
    """A rank of a context-parallel group."""

    rank: int = 0
    size: int = 1
    """Ranks in the group; 1 without context parallelism."""


class Window(NamedTuple):
    """A contiguous run of response logits in this rank's packed stream."""

    stream_start: int
    """Offset of the run in this rank's stream of the micro-batch."""
    length: int
    token_start: int
    """Position in the full sequence of the first token that the run predicts."""


def zigzag_chunk_size(total_length: int, cp_size: int) -> int:
    """Return the number of tokens in each of the ``2 * cp_size`` chunks."""
    return math.ceil(total_length / (2 * cp_size))


def local_length(total_length: int, cp_size: int) -> int:
    """Return the number of tokens of a sequence on each zigzag rank, including padding; the full length without CP."""
    return total_length if cp_size == 1 else 2 * zigzag_chunk_size(total_length, cp_size)


def logits_and_tokens_offsets(
    total_length: int, response_length: int, cp: CPRank
) -> tuple[int, tuple[Span, Span], tuple[Span, Span], tuple[Span, Span]]:
    """Return the spans of a sample on a zigzag rank.

    Returns:
        ``(chunk_size, chunks, logits, tokens)``: the spans of the rank's two chunks in the padded sequence; in each
        chunk, the span of positions whose logits predict response tokens; and the span of those tokens, shifted by
        one.  ``logits`` and ``tokens`` are (0, 0) for a chunk without response logits.
    """
    prompt_length = total_length - response_length
    size = zigzag_chunk_size(total_length, cp.size)
    mirror = 2 * cp.size - 1 - cp.rank
    chunks = ((cp.rank * size, (cp.rank + 1) * size), (mirror * size, (mirror + 1) * size))
    logits: list[Span] = []
    tokens: list[Span] = []
    for chunk_start, chunk_end in chunks:
        start, end = max(chunk_start, prompt_length - 1), min(chunk_end, total_length - 1)
        is_empty = start >= end
        logits.append((0, 0) if is_empty else (start, end))
        tokens.append((0, 0) if is_empty else (start + 1, end + 1))
    return size, chunks, (logits[0], logits[1]), (tokens[0], tokens[1])


def response_spans(total_length: int, response_length: int, cp: CPRank) -> list[Span]:
    """Return the spans of response tokens, relative to the response, whose logits are on this zigzag rank."""
    if cp.size == 1:
        return [(0, response_length)]
    prompt_length = total_length - response_length
    _, _, _, tokens = logits_and_tokens_offsets(total_length, response_length, cp)
    return [(start - prompt_length, end - prompt_length) for start, end in tokens if end > start]


def slice_zigzag(tokens: Tensor, cp: CPRank, *, pad_value: float = 0) -> Tensor:
    """Return this rank's two chunks of a sequence, concatenated; without CP, the sequence itself.

    Args:
        tokens: [L, ...]; trailing dimensions are kept.
        cp: This rank.
        pad_value: Value for the positions beyond L.
    """
    if cp.size == 1:
        return tokens
    size = zigzag_chunk_size(len(tokens), cp.size)
    padding = 2 * cp.size * size - len(tokens)
    padded = F.pad(tokens, (0, 0) * (tokens.dim() - 1) + (0, padding), value=pad_value)
    mirror = 2 * cp.size - 1 - cp.rank
    return torch.cat([padded[cp.rank * size : (cp.rank + 1) * size], padded[mirror * size : (mirror + 1) * size]])


def slice_response(values_R: Tensor, total_length: int, response_length: int, cp: CPRank) -> Tensor:
    """Return the entries [r, ...] of a per-response-token tensor [R, ...] whose logits are on this zigzag rank."""
    if len(values_R) != response_length:
        raise ValueError(f"{len(values_R)} values for a response of {response_length} tokens; each token needs one")
    if cp.size == 1:
        return values_R
    spans = response_spans(total_length, response_length, cp)
    return torch.cat([values_R[start:end] for start, end in spans]) if spans else values_R[:0]


def place_response(values_r: Tensor, total_length: int, response_length: int, cp: CPRank) -> Tensor:
    """Scatter this rank's entries [r, ...] into a zero tensor [R, ...] of the whole response; differentiable.

    Summed over the context-parallel ranks, the result is the whole response: the inverse of ``slice_response``.
    """
    if cp.size == 1:
        return values_r
    pieces: list[Tensor] = []
    filled, taken, rest = 0, 0, values_r.shape[1:]
    for start, end in response_spans(total_length, response_length, cp):
        pieces += [values_r.new_zeros(start - filled, *rest), values_r[taken : taken + end - start]]
        filled, taken = end, taken + end - start
    assert taken == len(values_r), (taken, len(values_r), total_length, response_length, cp)
    return torch.cat([*pieces, values_r[:0], values_r.new_zeros(response_length - filled, *rest)])


def response_windows(total_lengths: Sequence[int], response_lengths: Sequence[int], cp: CPRank) -> list[list[Window]]:
    """Return each sample's runs of response logits in this rank's packed stream, under zigzag or without CP."""
    windows: list[list[Window]] = []
    start_of_sample = 0
    for total, response in zip(total_lengths, response_lengths, strict=True):
        if cp.size == 1:
            runs = [Window(start_of_sample + total - response - 1, response, total - response)] if response else []
        else:
            size, chunks, logits, _ = logits_and_tokens_offsets(total, response, cp)
            runs = [
                Window(start_of_sample + order * size + start - chunk_start, end - start, start + 1)
                for order, ((chunk_start, _), (start, end)) in enumerate(zip(chunks, logits, strict=True))
                if end > start
            ]
        windows.append(runs)
        start_of_sample += local_length(total, cp.size)
    return windows


def allgather_response_windows(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    cp: CPRank,
    *,
    local_stream_length: int,
) -> list[list[Window]]:
    """Return each sample's run of response logits, if any, in this rank's contiguous chunk (all-gather layout)."""
    chunk_start = cp.rank * local_stream_length
    chunk_end = chunk_start + local_stream_length
    windows: list[list[Window]] = []
    start_of_sample = 0
    for total, response in zip(total_lengths, response_lengths, strict=True):
        first = start_of_sample + total - response - 1
        start, end = max(first, chunk_start), min(first + response, chunk_end)
        token_start = start - start_of_sample + 1
        windows.append([Window(start - chunk_start, end - start, token_start)] if end > start else [])
        start_of_sample += total
    return windows
