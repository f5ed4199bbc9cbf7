"""Logits of a packed micro-batch to per-sample log-probs, entropies and values of the response tokens.

Shapes: T = tokens of the packed micro-batch on this context-parallel rank, R = response tokens among them that some
logit here predicts, V = vocabulary rows of this tensor-parallel rank.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.algorithms.log_probs import KeptTokens, vocab_parallel_log_probs
from slime.backends.megatron_utils.cp_utils import cp_rank, has_contiguous_parts, zigzag_from_contiguous
from slime.train_data.context_parallel import allgather_response_windows, response_windows


def response_rows(
    total_lengths: Sequence[int], response_lengths: Sequence[int], *, contiguous_length: int | None = None
) -> tuple[Tensor, Tensor, list[int]]:
    """Return the rows of the packed logits that predict response tokens.

    Args:
        total_lengths: tokens of each sample.
        response_lengths: response tokens of each.
        contiguous_length: tokens of the micro-batch on this rank where it holds a contiguous part of the stream
            (``--allgather-cp``); None for two chunks of every sequence.

    Returns:
        ``(rows_R, positions_R, counts)``: row in the packed micro-batch; position of the predicted token in its
        sample; number of rows of each sample.
    """
    if contiguous_length is None:
        windows = response_windows(total_lengths, response_lengths, cp_rank())
    else:
        windows = allgather_response_windows(
            total_lengths, response_lengths, cp_rank(), local_stream_length=contiguous_length
        )
    runs = [window for sample in windows for window in sample]
    rows = [torch.arange(run.stream_start, run.stream_start + run.length) for run in runs]
    positions = [torch.arange(run.token_start, run.token_start + run.length) for run in runs]
    nothing = torch.empty(0, dtype=torch.long)
    counts = [sum(window.length for window in sample) for sample in windows]
    return torch.cat([nothing, *rows]), torch.cat([nothing, *positions]), counts


def reader_columns(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a micro-batch that :func:`get_log_probs_and_entropy` and its like read, by argument."""
    needed = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    return needed | {name: batch.get(f"rollout_{name}") for name in ("top_p_token_ids", "top_p_token_offsets")}


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
    overwrite_logits: bool = False,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Compute the log-prob of every response token under softmax(logits / temperature), and the entropy there.

    The columns that pad the vocabulary take no part: the engine has no such tokens, and their logits, which are 0,
    are probabilities like any other.

    Args:
        logits: [1, T, V], any floating dtype; the softmax is computed in fp32.
        args: ``rollout_temperature``, ``log_probs_chunk_size``, ``entropy_coef``, ``vocab_size`` are read.
        unconcat_tokens: the samples' full sequences.
        total_lengths: their lengths.
        response_lengths: response tokens of each.
        with_entropy: also the entropies, with a gradient only when ``entropy_coef`` is not 0.
        non_loss_data: ignored; Megatron's schedules pass it.
        top_p_token_ids: per sample, the token ids the engine kept at each response token, concatenated.
        top_p_token_offsets: per sample, [response_length + 1] positions in them.
        overwrite_logits: the backward pass may write the gradient over the logits, see ``vocab_parallel_log_probs``.

    Returns:
        an empty tensor, and ``{"log_probs": [...], "entropy": [...]}``: [local response tokens] fp32 per sample.
    """
    is_contiguous = has_contiguous_parts(args)
    rows_R, positions_R, counts = response_rows(
        total_lengths, response_lengths, contiguous_length=logits.shape[1] if is_contiguous else None
    )
    positions = positions_R.to(logits.device).split(counts)
    target_R = torch.cat([tokens[position] for tokens, position in zip(unconcat_tokens, positions, strict=True)])
    tp_rank, tp_size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    shard = logits.shape[-1]
    keep = None
    if top_p_token_ids is not None and top_p_token_offsets is not None:
        starts = [total - response for total, response in zip(total_lengths, response_lengths, strict=True)]
        in_response = [position - start for position, start in zip(positions_R.split(counts), starts, strict=True)]
        keep = _kept_by_top_p(in_response, top_p_token_ids, top_p_token_offsets, tp_rank * shard, shard, logits.device)
    log_prob_R, entropy_R = vocab_parallel_log_probs(
        logits.squeeze(0),
        target_R,
        rows_R=rows_R.to(logits.device),
        tp_group=mpu.get_tensor_model_parallel_group() if tp_size > 1 else None,
        chunk_size=args.log_probs_chunk_size,
        with_entropy=with_entropy,
        entropy_grad=args.entropy_coef != 0,
        keep=keep,
        temperature=args.rollout_temperature,
        num_columns=min(max(args.vocab_size - tp_rank * shard, 0), shard),
        overwrite_logits=overwrite_logits,
    )
    columns = {"log_probs": log_prob_R}
    if with_entropy:
        assert entropy_R is not None
        columns["entropy"] = entropy_R
    if is_contiguous:
        pieces = zigzag_from_contiguous(
            list(columns.values()), positions_R.split(counts), total_lengths, response_lengths
        )
        return logits.new_empty(0), dict(zip(columns, pieces, strict=True))
    return logits.new_empty(0), {name: list(column_R.split(counts)) for name, column_R in columns.items()}


def _kept_by_top_p(
    positions: Sequence[Tensor],
    token_ids: Sequence[Tensor],
    token_offsets: Sequence[Tensor],
    first_id: int,
    shard: int,
    device: torch.device,
) -> KeptTokens:
    """Return the tokens of the engine's nucleus in this vocabulary shard; a token without a record keeps everything.

    Args:
        positions: per sample, which of its response tokens this rank has the logits of.
        token_ids: per sample, the ids of all its nuclei.
        token_offsets: per sample, where each token's nucleus begins in them.
        first_id: token id of the shard's first column.
        shard: its columns.
        device: of the result.
    """
    rows, columns, counts = [], [], []
    first_row = 0
    for position, ids, offsets in zip(positions, token_ids, token_offsets, strict=True):
        offsets = torch.as_tensor(offsets).cpu().long()
        begin, count = offsets[position], offsets[position + 1] - offsets[position]
        row = torch.arange(first_row, first_row + len(position)).repeat_interleave(count)
        within = torch.arange(len(row)) - (count.cumsum(0) - count).repeat_interleave(count)
        rows.append(row)
        columns.append(torch.as_tensor(ids).cpu().long()[begin.repeat_interleave(count) + within] - first_id)
        counts.append(count)
        first_row += len(position)
    row_N, column_N = torch.cat(rows), torch.cat(columns)
    is_here_N = (column_N >= 0) & (column_N < shard)
    return KeptTokens(row_N[is_here_N].to(device), column_N[is_here_N].to(device), (torch.cat(counts) > 0).to(device))


def get_values(
    logits: Tensor,
    *,
    args: Namespace,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    **unused: Any,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Return the critic's value before every response token.

    Args:
        logits: [1, T, 1], the value head's output.
        args: ``allgather_cp`` is read.
        total_lengths: of the samples.
        response_lengths: response tokens of each.
        unused: what :func:`get_log_probs_and_entropy` needs besides.
    """
    is_contiguous = has_contiguous_parts(args)
    rows_R, positions_R, counts = response_rows(
        total_lengths, response_lengths, contiguous_length=logits.shape[1] if is_contiguous else None
    )
    value_R = logits.squeeze(-1).squeeze(0).index_select(0, rows_R.to(logits.device)).float()
    if is_contiguous:
        (values,) = zigzag_from_contiguous([value_R], positions_R.split(counts), total_lengths, response_lengths)
        return logits.new_empty(0), {"values": values}
    return logits.new_empty(0), {"values": list(value_R.split(counts))}
