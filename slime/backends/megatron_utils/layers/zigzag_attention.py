"""Causal attention where each context-parallel rank has two chunks of every sequence.

A sequence of length L lies on the ranks in 2 cp chunks of c = L / (2 cp) tokens: rank r has the chunks r and
2 cp - 1 - r, so that all ranks have the same work ("zigzag"; the load balance of Llama 3, arXiv 2407.21783, 3.3.2).
Keys and values of all ranks are gathered.  Both chunks end where their visible keys end, so a rank's chunks are 2 S
ordinary causal problems of one packed call: queries as they lie, and a copy of the keys that each chunk sees.

Shapes: S = sequences of the micro-batch, t = tokens of this rank (t = sum of 2 c), h = heads, d = head dimension,
K = (2 cp + 1) t / 2 key rows that the rank's chunks see together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Tensor]
"""(query, key, value, cu_q, cu_k, max_q, max_k) to the output, every query block at the end of its keys."""


@dataclass(frozen=True, slots=True)
class ZigzagPlan:
    """Which gathered rows each chunk of a rank attends to.  The same for all layers of a micro-batch."""

    cu_q: Tensor
    """int32 [2 S + 1], cumulative lengths of the chunks in the order in which they lie."""
    cu_k: Tensor
    """int32 [2 S + 1], cumulative numbers of the keys that they see."""
    rows_K: Tensor
    """int64 [K], those keys as rows of what all ranks gathered."""

    @classmethod
    def build(cls, cu: Tensor, num_local: int, *, cp_rank: int, cp_size: int) -> ZigzagPlan:
        """From cumulative full lengths [S + 1], each a multiple of 2 cp, without waiting for the device."""
        chunk_S = cu.diff().long() // (2 * cp_size)
        seen = torch.tensor([cp_rank + 1, 2 * cp_size - cp_rank], device=cu.device)
        keys_2S = (chunk_S[:, None] * seen).flatten()
        cu_q, cu_k = (F.pad(x.cumsum(0), (1, 0)) for x in (chunk_S.repeat_interleave(2), keys_2S))
        num_keys = (2 * cp_size + 1) * num_local // 2
        block_K = torch.arange(len(keys_2S), device=cu.device).repeat_interleave(keys_2S, output_size=num_keys)
        position_K = torch.arange(num_keys, device=cu.device) - cu_k[block_K]
        sequence_K = block_K // 2
        length_K = chunk_S[sequence_K]
        number_K = position_K // length_K  # of the chunk within its sequence
        is_second_K = number_K >= cp_size
        owner_K = torch.where(is_second_K, 2 * cp_size - 1 - number_K, number_K)
        first_K = cu[:-1].long()[sequence_K] // cp_size + is_second_K * length_K
        rows_K = owner_K * num_local + first_K + position_K % length_K
        return cls(cu_q.int(), cu_k.int(), rows_K)


_PLANS = WeakTensorKeyDictionary()
"""Plan of each micro-batch by its cumulative lengths: made in its first layer, used by the others and by recompute."""


def _plan_of(cu: Tensor, num_local: int, cp_rank: int, cp_size: int) -> ZigzagPlan:
    key = (num_local, cp_rank, cp_size)
    known: dict[tuple[int, int, int], ZigzagPlan] = _PLANS.setdefault(cu, {})
    if key not in known:
        known[key] = ZigzagPlan.build(cu, num_local, cp_rank=cp_rank, cp_size=cp_size)
    return known[key]


def zigzag_attention(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu: Tensor,
    max_length: int,
    cp_group: torch.distributed.ProcessGroup,
    cp_rank: int,
    cp_size: int,
) -> Tensor:
    """Attention from this rank's chunks of every sequence to all earlier keys; gradients of keys go to their ranks.

    Args:
        attend: causal attention of packed sequences.
        query, key, value: [t, h, d] of this rank; keys may have fewer heads.
        cu: [S + 1] cumulative full lengths, each a multiple of 2 cp.
        max_length: no sequence is longer.
        cp_group: whose ranks hold the other chunks.
        cp_rank, cp_size: of the group.

    Returns:
        [t, h, d_v].
    """
    plan = _plan_of(cu, query.size(0), cp_rank, cp_size)
    keys, values = (
        gather_from_sequence_parallel_region(x.contiguous(), group=cp_group).index_select(0, plan.rows_K)
        for x in (key, value)
    )
    longest = max_length // (2 * cp_size)
    return attend(query, keys, values, plan.cu_q, plan.cu_k, longest, longest * (2 * cp_size - cp_rank))
