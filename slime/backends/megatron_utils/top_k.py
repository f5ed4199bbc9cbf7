"""Top-k distillation (``--opd-top-k``): what a teacher in the trainer keeps, and the student's divergence from it.

The column ``teacher_top`` has [R, 2, K] float32 numbers for each sample: the ids of the teacher's K likeliest tokens
at each response token (whole numbers, exact below 2**24) and their log-probs.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.log_probs import CHUNK_BYTES
from slime.algorithms.top_k import logits_of, reverse_kl_on_top, top_logits
from slime.backends.megatron_utils.log_probs import (
    get_log_probs_and_entropy,
    predicted_tokens,
    response_rows,
    vocab_group,
)
from slime.backends.megatron_utils.loss_columns import Batch
from slime.utils.errors import DataError


def get_log_probs_and_top(
    logits: Tensor, *, args: Namespace, rows_per_chunk: int | None = None, **columns: Any
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Compute what ``get_log_probs_and_entropy`` does, and ``top``: the teacher's column of each sample."""
    nothing, result = get_log_probs_and_entropy(logits, args=args, **columns)
    rows_R, positions_N = response_rows(args, logits, columns["total_lengths"], columns["response_lengths"])
    target_R = predicted_tokens(columns["unconcat_tokens"], positions_N)
    logits_TV = logits.squeeze(0)
    ids_RK, value_RK = top_logits(
        logits_TV,
        rows_R,
        args.opd_top_k,
        tp_group=vocab_group(),
        vocab_size=args.vocab_size,
        rows_per_chunk=rows_per_chunk or max(CHUNK_BYTES // (4 * logits_TV.shape[-1]), 1),
    )
    log_normaliser_R1 = _log_normaliser(logits_TV, rows_R, target_R, torch.cat(result["log_probs"]), args)
    top_R2K = torch.stack([ids_RK.float(), value_RK / args.rollout_temperature - log_normaliser_R1], dim=1)
    result["top"] = list(top_R2K.split([len(log_prob) for log_prob in result["log_probs"]]))
    return nothing, result


def top_k_divergence(args: Namespace, batch: Batch, logits: Tensor, log_probs: Sequence[Tensor]) -> list[Tensor]:
    """Return the reverse KL from the teacher's top tokens at each response token, [r] for each sample.

    Args:
        log_probs: [r] of the response tokens, of the same logits and with their gradient.

    Raises:
        DataError: there is no ``teacher_top``.
    """
    if batch.get("teacher_top") is None:
        raise DataError(
            "--opd-top-k needs the teacher's likeliest tokens, and the samples have none. They come from --opd-type "
            "megatron, or from slime.rollout.on_policy_distillation.reward_func and post_process_rewards."
        )
    logits_TV = logits.squeeze(0)
    rows_R, positions_N = response_rows(args, logits, batch["total_lengths"], batch["response_lengths"])
    target_R = predicted_tokens(batch["unconcat_tokens"], positions_N)
    # What is not trained may hold anything; it is taken out of the loss later, and must not reach the gradient.
    top_R2K = torch.cat(list(batch["teacher_top"])).nan_to_num(0.0)
    ids_RK, teacher_RK = top_R2K[:, 0].long(), top_R2K[:, 1]
    log_normaliser_R1 = _log_normaliser(logits_TV, rows_R, target_R, torch.cat(list(log_probs)), args)
    student_RK = logits_of(logits_TV, rows_R, ids_RK, tp_group=vocab_group()) / args.rollout_temperature
    divergence_R = reverse_kl_on_top(student_RK - log_normaliser_R1, teacher_RK)
    return list(divergence_R.split([len(log_prob) for log_prob in log_probs]))


def _log_normaliser(
    logits_TV: Tensor, rows_R: Tensor, target_R: Tensor, log_prob_R: Tensor, args: Namespace
) -> Tensor:
    """Return [R, 1] logsumexp of the rows: the target's logit less its log-prob, so no second pass over the logits."""
    target_logit_R1 = logits_of(logits_TV, rows_R, target_R[:, None], tp_group=vocab_group())
    return target_logit_R1 / args.rollout_temperature - log_prob_R[:, None]
