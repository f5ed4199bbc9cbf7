"""Computes per-sample log-probs, entropies and values of response tokens from the logits of a packed micro-batch.

Shapes: T = tokens of the packed micro-batch on this context-parallel rank; R = response tokens predicted by logits on
this rank; V = vocabulary rows of this tensor-parallel rank.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from torch import Tensor

from slime.algorithms.log_probs import KeptTokens, vocab_parallel_log_probs
from slime.backends.megatron_utils.cp_utils import cp_rank, has_contiguous_parts, zigzag_from_contiguous
from slime.train_data.context_parallel import allgather_response_windows, response_windows

Reader = Callable[..., tuple[Tensor, dict[str, list[Tensor]]]]
"""``get_log_probs_and_entropy`` or ``get_values``: logits to per-sample tensors."""


def vocab_group() -> dist.ProcessGroup | None:
    """Return the group of ranks that shard the vocabulary; None if this rank has all of it."""
    return mpu.get_tensor_model_parallel_group() if mpu.get_tensor_model_parallel_world_size() > 1 else None


def response_rows(
    logits: Tensor, total_lengths: Sequence[int], response_lengths: Sequence[int], *, allgather_cp: bool
) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the rows of the packed logits that predict response tokens.

    Args:
        logits: [1, T, ...].

    Returns:
        ``(rows_R, positions_N)``: indices into T, on the logits' device; per sample, the positions of the predicted
        tokens in the sample, on the host.
    """
    if has_contiguous_parts(allgather_cp):
        windows = allgather_response_windows(
            total_lengths, response_lengths, cp_rank(), local_stream_length=logits.shape[1]
        )
    else:
        windows = response_windows(total_lengths, response_lengths, cp_rank())
    runs = [window for sample in windows for window in sample]
    rows = [torch.arange(run.stream_start, run.stream_start + run.length) for run in runs]
    positions = [torch.arange(run.token_start, run.token_start + run.length) for run in runs]
    nothing = torch.empty(0, dtype=torch.long)
    counts = [sum(window.length for window in sample) for sample in windows]
    return torch.cat([nothing, *rows]).to(logits.device), torch.cat([nothing, *positions]).split(counts)


def predicted_tokens(tokens_N: Sequence[Tensor], positions_N: Sequence[Tensor]) -> Tensor:
    """Return the tokens at these positions of each sample, concatenated: [R]."""
    on_device = torch.cat(list(positions_N)).to(tokens_N[0].device).split([len(position) for position in positions_N])
    return torch.cat([tokens[position] for tokens, position in zip(tokens_N, on_device, strict=True)])


def _by_sample(
    columns: Mapping[str, Tensor],
    positions_N: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    *,
    allgather_cp: bool,
) -> dict[str, list[Tensor]]:
    """Split columns [R], in the order of :func:`response_rows`, into [local response tokens] per sample."""
    if has_contiguous_parts(allgather_cp):
        return zigzag_from_contiguous(columns, positions_N, total_lengths, response_lengths)
    counts = [len(position) for position in positions_N]
    return {name: list(column_R.split(counts)) for name, column_R in columns.items()}


def reader_columns(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a micro-batch that a :data:`Reader` takes as keyword arguments."""
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
    """Compute the log-prob of every response token under softmax(logits / temperature), and optionally the entropy.

    Vocabulary padding is left out: the engine has no such tokens, and even a logit of 0 would have a probability.

    Args:
        logits: [1, T, V], any floating dtype; the softmax is computed in fp32.
        with_entropy: also compute entropies, with a gradient only if ``entropy_coef`` is not 0.
        non_loss_data: ignored; Megatron's schedules pass it.
        top_p_token_ids: per sample, the token ids that the engine's top-p kept at each response token, concatenated.
        top_p_token_offsets: per sample, [response_length + 1] offsets into ``top_p_token_ids``.
        overwrite_logits: the backward pass may write the gradient over the logits, see ``vocab_parallel_log_probs``.

    Returns:
        an empty tensor, and ``{"log_probs": [...], "entropy": [...]}``: [local response tokens] fp32 per sample;
        ``entropy`` only with ``with_entropy``.
    """
    lengths = total_lengths, response_lengths
    rows_R, positions_N = response_rows(logits, *lengths, allgather_cp=args.allgather_cp)
    keep = None
    if top_p_token_ids is not None and top_p_token_offsets is not None:
        starts = [total - response for total, response in zip(total_lengths, response_lengths, strict=True)]
        in_response = [position - start for position, start in zip(positions_N, starts, strict=True)]
        first_id = mpu.get_tensor_model_parallel_rank() * logits.shape[-1]
        keep = _kept_by_top_p(
            in_response, top_p_token_ids, top_p_token_offsets, first_id, logits.shape[-1], logits.device
        )
    log_prob_R, entropy_R = vocab_parallel_log_probs(
        logits.squeeze(0),
        predicted_tokens(unconcat_tokens, positions_N),
        rows_R=rows_R,
        tp_group=vocab_group(),
        chunk_size=args.log_probs_chunk_size,
        with_entropy=with_entropy,
        entropy_grad=args.entropy_coef != 0,
        keep=keep,
        temperature=args.rollout_temperature,
        vocab_size=args.vocab_size,
        overwrite_logits=overwrite_logits,
    )
    columns = {"log_probs": log_prob_R}
    if with_entropy:
        assert entropy_R is not None
        columns["entropy"] = entropy_R
    return logits.new_empty(0), _by_sample(columns, positions_N, *lengths, allgather_cp=args.allgather_cp)


def _kept_by_top_p(
    positions: Sequence[Tensor],
    token_ids: Sequence[Tensor],
    token_offsets: Sequence[Tensor],
    first_id: int,
    shard: int,
    device: torch.device,
) -> KeptTokens:
    """Return the ids in this vocabulary shard that the engine's top-p kept; a token without a record keeps all ids.

    Args:
        positions: per sample, the response tokens whose logits this rank has.
        token_ids: per sample, the kept ids of all its response tokens, concatenated.
        token_offsets: per sample, the offset of each response token's ids in ``token_ids``.
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
    """Return an empty tensor, and ``{"values": [...]}``: the critic's values before every response token, [local
    response tokens] fp32 per sample.

    Args:
        logits: [1, T, 1], the value head's output.
        unused: arguments that only :func:`get_log_probs_and_entropy` reads.
    """
    lengths = total_lengths, response_lengths
    rows_R, positions_N = response_rows(logits, *lengths, allgather_cp=args.allgather_cp)
    columns = {"values": logits.squeeze(-1).squeeze(0).index_select(0, rows_R).float()}
    return logits.new_empty(0), _by_sample(columns, positions_N, *lengths, allgather_cp=args.allgather_cp)
