"""Logits of a packed micro-batch to per-sample log-probs, entropies and values of the response tokens.

Shapes: T = tokens of the packed micro-batch on this context-parallel rank, R = response tokens among them that some
logit here predicts, V = vocabulary rows of this tensor-parallel rank.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.algorithms.log_probs import vocab_parallel_log_probs
from slime.train_data.context_parallel import response_windows


def response_rows(total_lengths: Sequence[int], response_lengths: Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
    """Which rows of the packed logits predict response tokens.

    Returns:
        ``(rows_R, positions_R, counts)``: row in the packed micro-batch; position of the predicted token in its
        sample; number of rows of each sample.
    """
    windows = response_windows(
        total_lengths,
        response_lengths,
        cp_rank=mpu.get_context_parallel_rank(),
        cp_size=mpu.get_context_parallel_world_size(),
    )
    runs = [window for sample in windows for window in sample]
    rows = [torch.arange(run.stream_start, run.stream_start + run.length) for run in runs]
    positions = [torch.arange(run.token_start, run.token_start + run.length) for run in runs]
    nothing = torch.empty(0, dtype=torch.long)
    counts = [sum(window.length for window in sample) for sample in windows]
    return torch.cat([nothing, *rows]), torch.cat([nothing, *positions]), counts


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Namespace,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    top_p_token_ids: Sequence[Tensor] | None = None,
    top_p_token_offsets: Sequence[Tensor] | None = None,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Log-prob of every response token under softmax(logits / temperature), and the entropy there.

    Args:
        logits: [1, T, V], any floating dtype; the softmax is computed in fp32.
        args: ``rollout_temperature``, ``log_probs_chunk_size``, ``entropy_coef`` are read.
        unconcat_tokens: the samples' full sequences.
        total_lengths: their lengths.
        response_lengths: response tokens of each.
        with_entropy: also the entropies, with a gradient only when ``entropy_coef`` is not 0.
        non_loss_data: ignored; Megatron's schedules pass it.
        top_p_token_ids: per sample, the token ids the engine kept at each response token, concatenated.
        top_p_token_offsets: per sample, [response_length + 1] positions in them.

    Returns:
        an empty tensor, and ``{"log_probs": [...], "entropy": [...]}``: [local response tokens] fp32 per sample.
    """
    rows_R, positions_R, counts = response_rows(total_lengths, response_lengths)
    positions = positions_R.to(logits.device).split(counts)
    target_R = torch.cat([tokens[position] for tokens, position in zip(unconcat_tokens, positions, strict=True)])
    logits_RV = logits.squeeze(0).index_select(0, rows_R.to(logits.device))
    hide_vocabulary_padding(logits_RV, args.vocab_size)
    keep_mask_RV = None
    if top_p_token_ids is not None and top_p_token_offsets is not None:
        prompts = [total - response for total, response in zip(total_lengths, response_lengths, strict=True)]
        in_response = [position - prompt for position, prompt in zip(positions, prompts, strict=True)]
        keep_mask_RV = _kept_by_top_p(logits_RV, target_R, in_response, top_p_token_ids, top_p_token_offsets)
    log_prob_R, entropy_R = vocab_parallel_log_probs(
        logits_RV,
        target_R,
        tp_group=mpu.get_tensor_model_parallel_group() if mpu.get_tensor_model_parallel_world_size() > 1 else None,
        chunk_size=args.log_probs_chunk_size,
        with_entropy=with_entropy,
        entropy_grad=args.entropy_coef != 0,
        keep_mask_TV=keep_mask_RV,
        temperature=args.rollout_temperature,
    )
    result = {"log_probs": list(log_prob_R.split(counts))}
    if with_entropy:
        assert entropy_R is not None
        result["entropy"] = list(entropy_R.split(counts))
    return logits.new_empty(0), result


def hide_vocabulary_padding(logits_RV: Tensor, vocab_size: int) -> None:
    """Take the padding columns of this rank's shard out of the softmax, in place.

    The engine's vocabulary has no such columns; their logits are 0, which is a probability like any other.
    """
    shard = logits_RV.shape[1]
    num_real = vocab_size - mpu.get_tensor_model_parallel_rank() * shard
    if num_real < shard:
        logits_RV[:, max(num_real, 0) :] = float("-inf")


def _kept_by_top_p(
    logits_RV: Tensor,
    target_R: Tensor,
    positions: Sequence[Tensor],
    token_ids: Sequence[Tensor],
    token_offsets: Sequence[Tensor],
) -> Tensor:
    """True where the engine's nucleus (or the sampled token) lies; rows without a record keep everything."""
    num_rows, shard = logits_RV.shape
    first = mpu.get_tensor_model_parallel_rank() * shard
    keep = torch.zeros(num_rows, shard, dtype=torch.bool, device=logits_RV.device)
    rows, columns, unrecorded = [torch.arange(num_rows, device=target_R.device)], [target_R - first], []
    start = 0
    for position, ids, offsets in zip(positions, token_ids, token_offsets, strict=True):
        for row, index in enumerate(position.tolist(), start=start):
            begin, end = int(offsets[index]), int(offsets[index + 1])
            if begin == end:
                unrecorded.append(row)
                continue
            rows.append(target_R.new_full((end - begin,), row))
            columns.append(ids[begin:end].to(target_R) - first)
        start += len(position)
    row_N, column_N = torch.cat(rows), torch.cat(columns)
    is_here = (column_N >= 0) & (column_N < shard)
    keep[row_N[is_here], column_N[is_here]] = True
    if unrecorded:
        keep[unrecorded] = True
    return keep


def get_values(
    logits: Tensor,
    *,
    args: Namespace,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    top_p_token_ids: Sequence[Tensor] | None = None,
    top_p_token_offsets: Sequence[Tensor] | None = None,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """The critic's value before every response token; arguments as in :func:`get_log_probs_and_entropy`.

    Args:
        logits: [1, T, 1], the value head's output.
    """
    rows_R, _, counts = response_rows(total_lengths, response_lengths)
    value_R = logits.squeeze(-1).squeeze(0).index_select(0, rows_R.to(logits.device)).float()
    return logits.new_empty(0), {"values": list(value_R.split(counts))}
