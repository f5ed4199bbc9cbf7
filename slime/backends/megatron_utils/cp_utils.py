"""Slices tokens and per-token lists for this context-parallel rank, and gathers them again.

The arithmetic is in ``slime.train_data.context_parallel``; this module passes rank and size from ``mpu``.  Per-sample
tensors (log-probs, advantages, ...) are local to the context-parallel rank; loss masks are whole.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import overload

import torch
import torch.distributed as dist
from megatron.core import mpu
from torch import Tensor

from slime.algorithms.reduction import Reducer, sum_of_sample_means
from slime.train_data import context_parallel
from slime.train_data.context_parallel import CPRank
from slime.train_data.microbatch import PackingConfig


def cp_rank() -> CPRank:
    """Return this rank and the size of its context-parallel group."""
    return CPRank(mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size())


def has_contiguous_parts(allgather_cp: bool) -> bool:
    """Return True if each context-parallel rank has a contiguous part of the stream (``--allgather-cp``)."""
    return allgather_cp and mpu.get_context_parallel_world_size() > 1


def packing_of(args: Namespace) -> PackingConfig:
    """Return how this rank packs its micro-batches."""
    return PackingConfig(
        cp_rank(),
        pad_multiple=mpu.get_tensor_model_parallel_world_size() * args.data_pad_size_multiplier,
        layout="allgather" if has_contiguous_parts(args.allgather_cp) else "zigzag",
    )


def get_logits_and_tokens_offset_with_cp(
    total_length: int, response_length: int
) -> tuple[int, tuple[tuple[int, int], ...], tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """Return the positions of this rank's two chunks of a sequence, and of the rows that give response log-probs.

    Returns:
        the chunk size; then for the chunks, the logit rows, and the tokens they predict: (start, end) in the sequence.
    """
    return context_parallel.logits_and_tokens_offsets(total_length, response_length, cp_rank())


def slice_with_cp(tokens: Tensor, pad_value: float | int) -> Tensor:
    """Return this rank's two chunks of a sequence, which is padded so that all ranks have equal chunks."""
    return context_parallel.slice_zigzag(tokens, cp_rank(), pad_value=pad_value)


@overload
def slice_log_prob_with_cp(log_prob: Tensor, total_length: int, response_length: int) -> Tensor: ...


@overload
def slice_log_prob_with_cp(log_prob: list[float], total_length: int, response_length: int) -> list[float]: ...


def slice_log_prob_with_cp(
    log_prob: list[float] | Tensor, total_length: int, response_length: int
) -> list[float] | Tensor:
    """Return this rank's part of a list or tensor with one entry per response token."""
    if isinstance(log_prob, Tensor):
        return context_parallel.slice_response(log_prob, total_length, response_length, cp_rank())
    spans = context_parallel.response_spans(total_length, response_length, cp_rank())
    return [value for start, end in spans for value in log_prob[start:end]]


def local_responses(
    column_N: Sequence[Tensor], total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> list[Tensor]:
    """Return this rank's part of per-token columns such as loss masks: [R] to [r] per sample."""
    return [
        slice_log_prob_with_cp(values_R, total, response)
        for values_R, total, response in zip(column_N, total_lengths, response_lengths, strict=True)
    ]


class _SumOverContextRanks(torch.autograd.Function):
    """All-reduce over context-parallel ranks, also of the gradient: any rank's loss may depend on any rank's input."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=mpu.get_context_parallel_group())
        return total

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=mpu.get_context_parallel_group())
        return total


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int) -> Tensor:
    """Gather a whole response from the parts of all context-parallel ranks.  Differentiable, collective.

    Args:
        tensor: [local response tokens, ...], as returned by ``slice_log_prob_with_cp``.

    Returns:
        [response_length, ...], equal on all ranks.
    """
    if mpu.get_context_parallel_world_size() == 1:
        return tensor
    placed = context_parallel.place_response(tensor, total_length, response_length, cp_rank())
    return _SumOverContextRanks.apply(placed)


def whole_responses(
    column_N: Sequence[Tensor], total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> list[Tensor]:
    """Gather per-token columns, [r] to [R] per sample: the inverse of :func:`local_responses`.  Collective."""
    return [
        all_gather_with_cp(values_r, total, response)
        for values_r, total, response in zip(column_N, total_lengths, response_lengths, strict=True)
    ]


def zigzag_from_contiguous(
    columns: Mapping[str, Tensor],
    positions: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> dict[str, list[Tensor]]:
    """Move per-token values from the contiguous layout of ``--allgather-cp`` to the zigzag layout.

    Advantages, losses and metrics then need not know how the stream was cut.  One all-reduce for all columns.
    Differentiable, collective over context-parallel ranks.

    Args:
        columns: by name, the values of the response tokens in this rank's contiguous part of the stream, samples
            concatenated.
        positions: per sample, the positions in the sample of the tokens that those values belong to.

    Returns:
        for each column, per sample, the values that :func:`local_responses` would cut from the whole responses.
    """
    places, start = [], 0
    for position, total, response in zip(positions, total_lengths, response_lengths, strict=True):
        places.append(position - (total - response) + start)
        start += response
    mine = torch.stack(list(columns.values()))
    place_R = torch.cat(places).to(mine.device)
    whole = _SumOverContextRanks.apply(mine.new_zeros(len(columns), start).index_add(1, place_R, mine))
    return {
        name: local_responses(column.split(list(response_lengths)), total_lengths, response_lengths)
        for name, column in zip(columns, whole, strict=True)
    }


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    sample_denoms: Sequence[float] | Tensor | None = None,
    calculate_per_token_loss: bool = False,
) -> Reducer:
    """Return a reducer of flat per-token values (this rank's response tokens, samples concatenated) to a scalar.

        sum over samples i of (x_i * mask_i).sum() / max(denominator_i, 1),      or per token: (x * mask).sum()

    Args:
        loss_masks: [response_length] each, not sliced.
        sample_denoms: the denominators (``rollout_mask_sums``); None takes the sums of the masks.
        calculate_per_token_loss: return the sum over tokens, without denominators.
    """
    if sample_denoms is None:
        sample_denoms = torch.stack([mask.sum() for mask in loss_masks])
    return sum_of_sample_means(
        local_responses(loss_masks, total_lengths, response_lengths), sample_denoms, per_token=calculate_per_token_loss
    )
