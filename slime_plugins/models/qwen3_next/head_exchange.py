"""Context parallelism of a layer that needs whole sequences: ranks trade tokens for heads and back (all-to-all).

A context-parallel rank holds chunks ``r`` and ``2 cp - 1 - r`` of every sequence, for all of its heads.  A recurrence
needs the tokens in order; so each rank takes a share of the heads, for all tokens, and gives the outputs back.

Shapes: t = tokens of this rank, T = t * cp tokens of the whole stream, h = heads that the ranks share, w = any width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.tensor_parallel.mappings import all_to_all

from slime_plugins.models.qwen3_next.packed_rows import cumulative_lengths


def heads_for_tokens(x: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[t, h, w] of every rank to [T, h / cp, w]: all tokens, in their natural order, of this rank's share of heads.

    Args:
        x: heads in their order; cp must divide their number.
        order: of :func:`natural_order`.
        group: the context-parallel ranks.
    """
    shares = x.unflatten(1, (group.size(), -1)).transpose(0, 1).flatten(0, 1).contiguous()
    return all_to_all(group, shares).index_select(0, order)


def tokens_for_heads(x: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse of :func:`heads_for_tokens`."""
    by_rank = torch.empty_like(order)
    by_rank[order] = torch.arange(order.numel(), device=order.device)
    shares = all_to_all(group, x.index_select(0, by_rank).contiguous())
    return shares.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)


def natural_order(packed_seq_params: Any, cp_size: int) -> Tensor:
    """[T] where each token of the stream lies in the ranks' parts, one part behind the other; kept on its argument."""
    cached = vars(packed_seq_params).get("natural_order")
    if cached is None:
        cu = cumulative_lengths(packed_seq_params)
        cached = zigzag_places(cu.tolist(), cp_size).to(cu.device)
        packed_seq_params.natural_order = cached
    return cached


def zigzag_places(offsets: list[int], cp_size: int) -> Tensor:
    """[T] for sequences that begin at ``offsets`` (the last is the end), each a multiple of 2 * cp_size long."""
    per_rank = offsets[-1] // cp_size
    places = []
    for begin, end in zip(offsets, offsets[1:], strict=False):
        size = (end - begin) // (2 * cp_size)
        for chunk in range(2 * cp_size):
            rank = min(chunk, 2 * cp_size - 1 - chunk)
            is_second = chunk >= cp_size
            first = rank * per_rank + begin // cp_size + is_second * size
            places.append(torch.arange(first, first + size))
    return torch.cat(places)
