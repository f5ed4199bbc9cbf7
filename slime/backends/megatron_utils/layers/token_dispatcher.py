"""Sends tokens to the ranks of their experts, sorts them by expert, and combines the outputs.

It replaces megatron-core's all-to-all dispatcher, which sends a token once per expert, always reads the number of each
expert's tokens on the host, permutes tokens in one piece per expert, and sums the outputs of a token's experts in
bf16, in any order.  Here a token is sent once to each rank that has some of its experts (as in DeepEP, DeepSeek-V3,
arXiv 2412.19437, 3.2.2) and copied for these experts there; the rank returns the sum of their outputs.  Sums are
computed in fp32 in a fixed order.  The host waits for the device once per layer, for the sizes of the transfers, and
only if experts are distributed over ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.backends.megatron_utils.layers.row_copies import RowCopies, copy_rows, sum_copies


class GatherDispatcher(MoETokenDispatcher):
    """All-to-all dispatcher for routing with exactly k experts per token.

    It serves one pass through a layer at a time: dispatch, experts, combine.  Shapes: T = tokens of this rank, k =
    experts per token, H = hidden size, E = experts, e = experts of this rank, R = input rows of these experts, one per
    token and expert.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config, pg_collection)
        self.num_local_experts = num_local_experts
        self.topk: int = config.moe_router_topk
        self.is_spread = self.ep_size > 1 or self.tp_size > 1

    @staticmethod
    def serves(config: TransformerConfig) -> bool:
        """Return True if this dispatcher supports the config: no dropped tokens, no overlap of shared experts."""
        return (
            config.moe_token_dispatcher_type == "alltoall"
            and config.moe_expert_capacity_factor is None
            and not config.moe_shared_expert_overlap
        )

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Copy each token once per rank that has some of its experts, sorted by rank.

        Args:
            tokens: [.., H].
            routing_map: [T, E] bool, with k entries True in each row.
            probs: [T, E].

        Returns:
            [rows, H] and their probabilities, [rows, e].
        """
        self.shape = tokens.shape
        self.probs_dtype = probs.dtype
        tokens = tokens.view(-1, tokens.size(-1))
        self.is_chosen = routing_map
        """[rows, e] bool: the experts of each row; sent along with the rows."""
        if not self.is_spread:
            self.num_rows = len(tokens) * self.topk
            return tokens, probs
        is_on_rank = routing_map.view(-1, self.ep_size, self.num_local_experts).any(2)
        self._plan(is_on_rank.sum(0), routing_map.sum(0))
        rank, token = _positions(is_on_rank.t(), sum(self.input_splits))
        self.to_ranks = RowCopies.of(token, len(tokens))
        piece = token * self.ep_size + rank
        self.is_chosen = routing_map.view(-1, self.num_local_experts)[piece]
        return copy_rows(tokens, self.to_ranks), probs.view(-1, self.num_local_experts).index_select(0, piece)

    def _plan(self, num_sent: Tensor, num_chosen: Tensor) -> None:
        """Exchange counts with all ranks, and compute the sizes of the transfers.

        Args:
            num_sent: [expert ranks] tokens that this rank sends to each.
            num_chosen: [E] tokens of this rank per expert.
        """
        told = gather_from_sequence_parallel_region(torch.cat([num_sent, num_chosen]), group=self.tp_ep_group)
        told = told.view(self.ep_size, self.tp_size, -1).transpose(0, 1)  # [tensor, expert rank, ..]
        mine = self.ep_group.rank()
        received, chosen = told[..., mine], told[..., self.ep_size :].unflatten(2, (self.ep_size, -1))[:, :, mine]
        # The only host synchronization: all_to_all and its buffers need the sizes as plain numbers.
        numbers = torch.cat([num_sent[None], received, chosen.sum((0, 2))[None]]).tolist()
        self.input_splits, *per_tensor_rank, chosen_by_sender = numbers
        self.num_rows = sum(chosen_by_sender)
        self.output_splits = per_tensor_rank[self.tp_rank]
        totals = [sum(splits) for splits in per_tensor_rank]
        # Tensor-parallel ranks hold different numbers of rows; pad to the largest, so that collectives are even.
        self.padding = max(totals) - totals[self.tp_rank]

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        if self.ep_size == 1:
            return hidden_states, probs
        splits = self.output_splits, self.input_splits
        self.is_chosen = all_to_all(self.ep_group, self.is_chosen.byte(), *splits).bool()
        return all_to_all(self.ep_group, hidden_states, *splits), all_to_all(self.ep_group, probs, *splits)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Copy each row once per local expert: return [R, H] sorted by expert, [e] rows per expert, and [R]
        probabilities.
        """
        if self.tp_size > 1:
            hidden_states, probs, is_chosen = (
                gather_from_sequence_parallel_region(F.pad(x, (0, 0, 0, self.padding)), group=self.tp_group)
                for x in (hidden_states, probs, self.is_chosen.byte())
            )
            self.is_chosen = is_chosen.bool()
        expert, row = _positions(self.is_chosen.t(), self.num_rows)
        self.to_experts = RowCopies.of(row, len(hidden_states))
        probs_R = probs.flatten().gather(0, row * self.num_local_experts + expert)
        return copy_rows(hidden_states, self.to_experts), self.is_chosen.sum(0), probs_R

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Sum the experts' outputs [R, H] over the experts of each row and over tensor-parallel ranks."""
        dtype = hidden_states.dtype
        hidden_states = sum_copies(hidden_states, self.to_experts)
        if self.tp_size > 1:
            hidden_states = reduce_scatter_to_sequence_parallel_region(
                hidden_states.to(self.probs_dtype), group=self.tp_group
            ).to(dtype)
            hidden_states = hidden_states[: len(hidden_states) - self.padding]
        return hidden_states

    def token_combine(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.ep_size == 1:
            return hidden_states
        return all_to_all(self.ep_group, hidden_states, self.input_splits, self.output_splits)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Sum the ranks' outputs for each token, and restore the shape of the tokens."""
        if self.is_spread:
            hidden_states = sum_copies(hidden_states, self.to_ranks)
        return hidden_states.view(self.shape)


def _positions(mask: Tensor, count: int) -> list[Tensor]:
    """Return the rows and columns of the ``count`` True elements of a matrix, row by row, int64 [count] each."""
    return [axis.contiguous() for axis in torch.nonzero_static(mask, size=count).unbind(1)]
