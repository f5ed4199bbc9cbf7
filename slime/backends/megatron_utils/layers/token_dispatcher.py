"""Tokens to the ranks and the order of their experts, and back: megatron-core's all-to-all dispatch by plain gathers.

megatron-core's own reads the number of each expert's tokens on the host even where nothing is sent, moves tokens by
cutting them into one piece per expert, and adds the outputs of a token's experts up in bf16, in any order.  Here rows
move by one gather in each direction, whose gradients are gathers again, sums over experts are taken in fp32 in a fixed
order, and the host waits for the device once per layer, only if experts are spread over ranks: it needs the sizes of
the transfers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig


class GatherDispatcher(MoETokenDispatcher):
    """All-to-all dispatcher for routing in which every token has exactly k experts.

    Used for one pass through a layer at a time: dispatch, experts, combine.  Shapes: T = tokens of this rank, k =
    experts of a token, H = hidden size, E = experts, e = experts of this rank, R = rows that this rank's experts see.
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
        """Return True when this dispatcher does what the config asks for: no dropped tokens, no overlap of shared
        experts.
        """
        return (
            config.moe_token_dispatcher_type == "alltoall"
            and config.moe_expert_capacity_factor is None
            and not config.moe_shared_expert_overlap
        )

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Copy each token once for each of its experts, sorted by expert.

        Args:
            tokens: [.., H].
            routing_map: [T, E] bool with k true in each row.
            probs: [T, E].

        Returns:
            [T * k, H] rows and their [T * k] probabilities.
        """
        self.shape = tokens.shape
        self.probs_dtype = probs.dtype
        tokens = tokens.view(-1, tokens.size(-1))
        chosen = routing_map.byte().topk(self.topk, dim=1).indices
        order = chosen.flatten().argsort(stable=True)
        self.token_of_row = order // self.topk
        self.row_of_copy = _inverse(order).view(chosen.shape)
        counts = routing_map.sum(0)
        if self.is_spread:
            self._plan(counts)
        else:
            self.tokens_per_expert = counts
        rows = _CopyToRows.apply(tokens, self.token_of_row, self.row_of_copy)
        return rows, probs.gather(1, chosen).flatten()[order]

    def _plan(self, counts: Tensor) -> None:
        """Plan, from the [E] rows that every rank has for every expert, who sends how many and where each row goes."""
        everyone = gather_from_sequence_parallel_region(counts, group=self.tp_ep_group)
        everyone = everyone.view(self.ep_size, self.tp_size, self.ep_size, self.num_local_experts).transpose(0, 1)
        mine = everyone[:, :, self.ep_group.rank()]  # [tensor, expert rank, e]
        self.tokens_per_expert = mine.sum((0, 1))
        sent = counts.view(self.ep_size, -1).sum(1)
        # The one wait of the host: all_to_all and the sizes of its buffers need plain numbers.
        numbers = torch.cat([sent[None], mine.sum(2)]).tolist()
        self.input_splits, per_tensor_rank = numbers[0], numbers[1:]
        self.output_splits = per_tensor_rank[self.tp_rank]
        totals = [sum(splits) for splits in per_tensor_rank]
        # Tensor-parallel ranks hold unlike numbers of rows: padded to the largest, so that collectives are even.
        self.padding = max(totals) - totals[self.tp_rank]
        self.num_received = max(totals) * self.tp_size
        # Rows arrive by tensor rank, sender, expert; they are wanted by expert first.
        within = mine.flatten(1).cumsum(1) - mine.flatten(1)
        starts = within + torch.arange(self.tp_size, device=counts.device)[:, None] * max(totals)
        block_start, block_size = (x.reshape(mine.shape).permute(2, 0, 1).flatten() for x in (starts, mine))
        num_rows = sum(totals)
        block_of = torch.repeat_interleave(block_size, output_size=num_rows)
        offset = block_start - (block_size.cumsum(0) - block_size)
        self.source = offset[block_of] + torch.arange(num_rows, device=counts.device)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send every row to the expert-parallel rank of its expert."""
        if self.ep_size == 1:
            return hidden_states, probs
        return (
            all_to_all(self.ep_group, hidden_states, self.output_splits, self.input_splits),
            all_to_all(self.ep_group, probs, self.output_splits, self.input_splits),
        )

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows [R, H] sorted by local expert, [e] rows of each, [R] probabilities."""
        if not self.is_spread:
            return hidden_states, self.tokens_per_expert, probs
        if self.tp_size > 1:
            hidden_states = gather_from_sequence_parallel_region(
                F.pad(hidden_states, (0, 0, 0, self.padding)), group=self.tp_group
            )
            probs = gather_from_sequence_parallel_region(F.pad(probs, (0, self.padding)), group=self.tp_group)
        return _TakeRows.apply(hidden_states, self.source), self.tokens_per_expert, _TakeRows.apply(probs, self.source)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the experts' outputs [R, H] in the order in which the rows arrived, summed over tensor-parallel
        ranks.
        """
        if not self.is_spread:
            return hidden_states
        dtype = hidden_states.dtype
        hidden_states = _PutRows.apply(hidden_states, self.source, self.num_received)
        if self.tp_size > 1:
            hidden_states = reduce_scatter_to_sequence_parallel_region(
                hidden_states.to(self.probs_dtype), group=self.tp_group
            ).to(dtype)
            hidden_states = hidden_states[: len(hidden_states) - self.padding]
        return hidden_states

    def token_combine(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Send every row back to the rank of its token."""
        if self.ep_size == 1:
            return hidden_states
        return all_to_all(self.ep_group, hidden_states, self.input_splits, self.output_splits)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Sum [T * k, H] over each token's experts, in the tokens' shape."""
        return _SumCopies.apply(hidden_states, self.token_of_row, self.row_of_copy).view(self.shape)


def _inverse(order: Tensor) -> Tensor:
    """Return the permutation that undoes ``order``."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _sum_copies(rows: Tensor, row_of_copy: Tensor) -> Tensor:
    """Sum the weighted copies, [T * k, H] and [T, k] to [T, H]; torch adds bf16 up in fp32."""
    return rows.index_select(0, row_of_copy.flatten()).view(*row_of_copy.shape, -1).sum(1)


class _CopyToRows(torch.autograd.Function):
    """Token t to its k rows; the gradient of a token is the sum over its rows."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token_of_row: Tensor, row_of_copy: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_copy)
        return tokens.index_select(0, token_of_row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _sum_copies(grad, *ctx.saved_tensors), None, None


class _SumCopies(torch.autograd.Function):
    """k rows to their token, summed; every row gets the token's gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_of_row: Tensor, row_of_copy: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_row)
        return _sum_copies(rows, row_of_copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, *ctx.saved_tensors), None, None


class _TakeRows(torch.autograd.Function):
    """``x[source]``, no row taken twice; the gradient goes back to the rows that were taken, zeros to the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(source)
        ctx.num_rows = len(x)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (source,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_rows, *grad.shape[1:]).index_copy_(0, source, grad), None


class _PutRows(torch.autograd.Function):
    """The inverse of taking rows: row i of ``x`` to row ``source[i]`` of ``num_rows``, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(source)
        return x.new_zeros(num_rows, *x.shape[1:]).index_copy_(0, source, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, *ctx.saved_tensors), None, None
