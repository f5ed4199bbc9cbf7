"""Distillation on the teacher's likeliest tokens: what a teacher keeps of its distribution, and the KL to it.

Shapes: T = rows of the logits (positions), R = rows that are asked for, V = columns of this rank's vocabulary shard,
K = tokens kept of each row.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

REST_FLOOR = 1e-6
"""Least probability that a teacher, or a student, is said to give to all the other tokens together."""


def reverse_kl_on_top(student_log_prob_RK: Tensor, teacher_log_prob_RK: Tensor) -> Tensor:
    """Return ``KL(student || teacher)`` over the teacher's K likeliest tokens and one bucket with all the others:

        sum_k p_k (log p_k - log q_k) + p_rest (log p_rest - log q_rest)

    It is 0 only where both agree on every one of the K tokens, and with K = the vocabulary it is the full reverse KL.

    Args:
        student_log_prob_RK: of the teacher's tokens, in nats; carries the gradient.
        teacher_log_prob_RK: of the same tokens; constant.

    Source: Agarwal et al., arXiv:2306.13649; the bucket keeps a truncated divergence from going below 0.
    """

    def with_rest(log_prob_RK: Tensor) -> Tensor:
        rest_R = (1 - log_prob_RK.exp().sum(dim=-1)).clamp(min=REST_FLOOR).log()
        return torch.cat([log_prob_RK, rest_R[:, None]], dim=-1)

    student_RK, teacher_RK = with_rest(student_log_prob_RK), with_rest(teacher_log_prob_RK.detach())
    return (student_RK.exp() * (student_RK - teacher_RK)).sum(dim=-1)


@torch.no_grad()
def top_logits(
    logits_TV: Tensor,
    rows_R: Tensor,
    k: int,
    *,
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int,
    rows_per_chunk: int,
) -> tuple[Tensor, Tensor]:
    """Return ``(ids_RK, logits_RK)`` of the k largest logits of each row in the whole vocabulary, the largest first.

    Args:
        logits_TV: this rank's columns.
        rows_R: int64 rows.
        k: at most ``V``.
        tp_group: the tensor-parallel group; None when this rank has the whole vocabulary.
        vocab_size: tokens of the whole vocabulary; columns of larger ids are padding.
        rows_per_chunk: rows handled at a time, to bound the memory.
    """
    shard = logits_TV.shape[-1]
    first_id = shard * dist.get_rank(tp_group) if tp_group is not None else 0
    values, ids = [], []
    is_padding_V = torch.arange(first_id, first_id + shard, device=logits_TV.device) >= vocab_size
    for rows in torch.split(rows_R, rows_per_chunk):
        chunk_KV = logits_TV[rows].float().masked_fill(is_padding_V, -torch.inf)
        best = chunk_KV.topk(k, dim=-1)
        values.append(best.values)
        ids.append(best.indices + first_id)
    if not values:
        nothing = logits_TV.new_empty(0, k, dtype=torch.float32)
        values, ids = [nothing], [nothing.long()]
    value_RK, id_RK = torch.cat(values), torch.cat(ids)
    if tp_group is None:
        return id_RK, value_RK
    value_RM, id_RM = _side_by_side(value_RK, tp_group), _side_by_side(id_RK, tp_group)
    best = value_RM.topk(k, dim=-1)
    return id_RM.gather(1, best.indices), best.values


def _side_by_side(local_RK: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(local_RK) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local_RK.contiguous(), group=group)
    return torch.cat(parts, dim=-1)
