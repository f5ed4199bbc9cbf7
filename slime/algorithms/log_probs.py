"""Log-probability and entropy of chosen tokens under vocabulary-sharded logits, with an exact gradient.

One pass over the logits each way, in chunks of rows, so that beside the logits (and their gradient) never more than
one chunk of them lives in float32.  Tensor-parallel ranks exchange two vectors of length T per call, whatever the
number of chunks: each shard is reduced against its own maximum, and the shards are put on a common one afterwards.

Shapes: T = rows (positions), V = columns of this rank's vocabulary shard, K = rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_parallel_log_probs(
    logits_TV: Tensor,
    target_T: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    chunk_size: int = -1,
    with_entropy: bool = False,
    entropy_grad: bool = True,
    keep_mask_TV: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """The log-probability of each target token and, on request, the entropy of each row:

        log_prob = z[target] - logsumexp(z)
        entropy = logsumexp(z) - sum(softmax(z) * z),    z = logits / temperature

    Computed in float32 (float64 when the logits are).  The gradient is that of the formula; it arrives in the dtype
    of the logits.

    Args:
        logits_TV: this rank's columns of the logits; rank k of the group has the ids ``[k * V, (k+1) * V)``.
        target_T: int64 ids in the whole vocabulary.
        tp_group: the tensor-parallel group; None when this rank has the whole vocabulary.
        chunk_size: rows handled at a time; -1 is all at once.
        with_entropy: whether to compute the entropy.
        entropy_grad: whether the entropy carries a gradient; without it the entropy is a mere metric.
        keep_mask_TV: bool, False where sampling could not have chosen the token (outside the nucleus).  Applies to
            the log-probability only, and the target is always kept.
        temperature: what sampling divided the logits by.

    Returns:
        ``(log_prob_T, entropy_T)``, the second None unless asked for.
    """
    num_rows, _ = logits_TV.shape
    assert target_T.shape == (num_rows,), (target_T.shape, logits_TV.shape)
    assert keep_mask_TV is None or keep_mask_TV.shape == logits_TV.shape, (keep_mask_TV.shape, logits_TV.shape)
    log_prob_T, entropy_T = _LogProbs.apply(  # type: ignore[no-untyped-call]
        logits_TV, target_T, tp_group, chunk_size, with_entropy, entropy_grad, keep_mask_TV, temperature
    )
    return log_prob_T, entropy_T if with_entropy else None


class _Normaliser(NamedTuple):
    """What turns a row of scaled logits into probabilities, and what comes off on the way."""

    log_sum_exp_T: Tensor
    target_logit_T: Tensor
    entropy_T: Tensor


class _LogProbs(torch.autograd.Function):
    """Keeps the logits themselves and two numbers per row; probabilities are recomputed chunk by chunk on the way
    back."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        target_T: Tensor,
        tp_group: dist.ProcessGroup | None,
        chunk_size: int,
        with_entropy: bool,
        entropy_grad: bool,
        keep_mask_TV: Tensor | None,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        tp_rank = dist.get_rank(tp_group) if tp_group is not None else 0
        local_target_T = target_T - tp_rank * logits_TV.shape[1]
        masked = _normalise(logits_TV, local_target_T, tp_group, chunk_size, temperature, keep_mask_TV, with_entropy)
        plain = masked
        if with_entropy and keep_mask_TV is not None:
            plain = _normalise(logits_TV, local_target_T, tp_group, chunk_size, temperature, None, True)
        log_prob_T = masked.target_logit_T - masked.log_sum_exp_T
        ctx.save_for_backward(
            logits_TV, local_target_T, keep_mask_TV, masked.log_sum_exp_T, plain.log_sum_exp_T, plain.entropy_T
        )
        ctx.chunk_size, ctx.temperature = chunk_size, temperature
        ctx.has_entropy_grad = with_entropy and entropy_grad
        if not ctx.has_entropy_grad:
            ctx.mark_non_differentiable(plain.entropy_T)
        return log_prob_T, plain.entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_log_prob_T, grad_entropy_T = grads
        logits_TV, local_target_T, keep_mask_TV, masked_lse_T, plain_lse_T, entropy_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        for rows in _row_blocks(len(logits_TV), ctx.chunk_size, num_buffers=2 if ctx.has_entropy_grad else 1):
            target_K = local_target_T[rows]
            grad_K = grad_log_prob_T[rows]
            # d log_prob / d z = onehot(target) - p, with p over the kept tokens
            grad_KV = _scaled_rows(logits_TV, rows, ctx.temperature)
            if keep_mask_TV is not None:
                _mask_rows(grad_KV, keep_mask_TV[rows], target_K)
            grad_KV.sub_(masked_lse_T[rows, None]).exp_().mul_(-grad_K[:, None])
            is_local_K, column_K = _local_columns(target_K, grad_KV.shape[1])
            grad_KV.scatter_add_(1, column_K[:, None], (grad_K * is_local_K)[:, None])
            if ctx.has_entropy_grad:
                # d entropy / d z = -p (log p + entropy) = entr(p) - p * entropy
                p_KV = _scaled_rows(logits_TV, rows, ctx.temperature).sub_(plain_lse_T[rows, None]).exp_()
                weight_K = grad_entropy_T[rows]
                grad_KV.addcmul_(p_KV, (-weight_K * entropy_T[rows])[:, None])
                grad_KV.addcmul_(torch.special.entr(p_KV, out=p_KV), weight_K[:, None])
                del p_KV
            grad_TV[rows] = grad_KV.div_(ctx.temperature)
            del grad_KV
        return grad_TV, None, None, None, None, None, None, None


def _normalise(
    logits_TV: Tensor,
    local_target_T: Tensor,
    tp_group: dist.ProcessGroup | None,
    chunk_size: int,
    temperature: float,
    keep_mask_TV: Tensor | None,
    with_entropy: bool,
) -> _Normaliser:
    """Reduce every row of the local shard against its own maximum, then put the shards on the common maximum."""
    num_rows = len(logits_TV)
    dtype = torch.promote_types(logits_TV.dtype, torch.float32)
    max_T = logits_TV.new_empty(num_rows, dtype=dtype)
    # rows of sums: 0 sum exp(z - max), 1 the target's logit on the rank that has it, 2 -sum exp(z - max) (z - max)
    sums_3T = logits_TV.new_zeros((3 if with_entropy else 2, num_rows), dtype=dtype)
    for rows in _row_blocks(num_rows, chunk_size, num_buffers=1):
        z_KV = _scaled_rows(logits_TV, rows, temperature)
        is_local_K, column_K = _local_columns(local_target_T[rows], z_KV.shape[1])
        if keep_mask_TV is not None:
            _mask_rows(z_KV, keep_mask_TV[rows], local_target_T[rows])
        target_logit_K = z_KV.gather(1, column_K[:, None]).squeeze(1)
        sums_3T[1, rows] = torch.where(is_local_K, target_logit_K, 0.0)
        # a shard may have no kept token at all: any finite maximum does for it
        max_K = z_KV.amax(dim=1).clamp_min(torch.finfo(dtype).min)
        max_T[rows] = max_K
        z_KV.sub_(max_K[:, None]).exp_()
        sums_3T[0, rows] = z_KV.sum(dim=1)
        if with_entropy:
            sums_3T[2, rows] = torch.special.entr(z_KV, out=z_KV).sum(dim=1)
        del z_KV
    if tp_group is not None:
        local_max_T = max_T.clone()
        dist.all_reduce(max_T, op=dist.ReduceOp.MAX, group=tp_group)
        shift_T = local_max_T - max_T
        if with_entropy:
            sums_3T[2] -= shift_T * sums_3T[0]
            sums_3T[2] *= shift_T.exp()
        sums_3T[0] *= shift_T.exp()
        dist.all_reduce(sums_3T, group=tp_group)
    log_sum_T = sums_3T[0].log()
    entropy_T = log_sum_T + sums_3T[2] / sums_3T[0] if with_entropy else torch.empty_like(max_T)
    return _Normaliser(max_T + log_sum_T, sums_3T[1], entropy_T)


def _row_blocks(num_rows: int, chunk_size: int, *, num_buffers: int) -> Iterator[slice]:
    """Row ranges small enough that ``num_buffers`` float32 copies of one are together no more than a chunk."""
    rows = max(num_rows, 1) if chunk_size <= 0 else max(chunk_size // num_buffers, 1)
    for start in range(0, num_rows, rows):
        yield slice(start, min(start + rows, num_rows))


def _scaled_rows(logits_TV: Tensor, rows: slice, temperature: float) -> Tensor:
    """A copy of some rows in the dtype of the computation, divided by the temperature."""
    z_KV = logits_TV[rows].to(torch.promote_types(logits_TV.dtype, torch.float32), copy=True)
    return z_KV if temperature == 1.0 else z_KV.div_(temperature)


def _local_columns(local_target_K: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Whether each target lies in this shard, and a column that is safe to index either way."""
    is_local_K = (local_target_K >= 0) & (local_target_K < num_columns)
    return is_local_K, local_target_K.clamp(0, num_columns - 1)


def _mask_rows(z_KV: Tensor, keep_mask_KV: Tensor, local_target_K: Tensor) -> None:
    """Set to -inf, in place, what could not have been sampled; the target itself always could."""
    is_local_K, column_K = _local_columns(local_target_K, z_KV.shape[1])
    target_logit_K = z_KV.gather(1, column_K[:, None])
    z_KV.masked_fill_(~keep_mask_KV, float("-inf"))
    masked_K = z_KV.gather(1, column_K[:, None])
    z_KV.scatter_(1, column_K[:, None], torch.where(is_local_K[:, None], target_logit_K, masked_K))
