"""Log-probability and entropy of chosen tokens under vocabulary-sharded logits, with an exact gradient.

The forward and the backward pass each read the logits once.  At most one chunk of them is held in float32 (none with
the fused kernels of ``log_probs_kernels``, used for CUDA tensors), and the gradient can overwrite the logits, so a
vocabulary of 150k costs one copy of its logits instead of four.  Tensor-parallel ranks exchange a few numbers per row,
independent of the number of chunks: each shard is reduced against its own maximum and then rescaled to the global one.

Shapes: T = rows of the logits (positions), R = requested rows, V = columns of this rank's vocabulary shard,
K = rows of one chunk, N = kept (row, token) pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 256 * 2**20
"""Bytes of float32 logits held at a time if no chunk size is given."""


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The tokens that sampling could have chosen in each row (its nucleus), as pairs instead of an [R, V] mask."""

    row_N: Tensor
    """Row of each pair, in 0 .. R - 1, ascending."""
    column_N: Tensor
    """Column of each pair's token in this rank's shard."""
    is_recorded_R: Tensor
    """bool [R]; rows without a recorded nucleus keep every token."""

    def mask(self, rows: slice, num_columns: int) -> Tensor:
        """Return the bool mask [K, num_columns] of a range of rows."""
        bounds = torch.tensor([rows.start, rows.stop], device=self.row_N.device)
        first, last = torch.searchsorted(self.row_N, bounds).tolist()
        keep_KV = (~self.is_recorded_R[rows, None]).repeat(1, num_columns)
        keep_KV[self.row_N[first:last] - rows.start, self.column_N[first:last]] = True
        return keep_KV


def vocab_parallel_log_probs(
    logits_TV: Tensor,
    target_R: Tensor,
    *,
    rows_R: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    chunk_size: int = -1,
    with_entropy: bool = False,
    entropy_grad: bool = True,
    keep: Tensor | KeptTokens | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    overwrite_logits: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each target token and, optionally, the entropy of each row:

        log_prob = z[target] - logsumexp(z)
        entropy = logsumexp(z) - sum(softmax(z) * z),    z = logits / temperature

    Computed in float32, or in float64 if the logits are.  The gradient is exact, in the dtype of the logits.

    Args:
        logits_TV: This rank's columns of the logits; rank k of the group has the ids ``[k * V, (k+1) * V)``.
        target_R: int64 ids in the whole vocabulary.
        rows_R: int64, the row of ``logits_TV`` that predicts each target, each row at most once; None means all rows.
            Other rows are not read and get a gradient of 0.
        tp_group: The tensor-parallel group; None if this rank has the whole vocabulary.
        chunk_size: Rows processed at a time; -1 means as many as fit into 256 MiB of float32.  Does not affect the
            result, and has no effect where the fused CUDA kernels are used, which hold no chunk.
        with_entropy: Whether to compute the entropy.
        entropy_grad: Whether the entropy carries a gradient; if not, it is only a metric.
        keep: The tokens that sampling could have chosen, as an [R, V] bool mask or as pairs.  Applies to the
            log-probability only; the target is always kept.
        temperature: Sampling temperature; divides the logits.
        vocab_size: Size of the whole vocabulary; columns of larger ids are padding with zero probability and gradient.
            None means no padding.
        overwrite_logits: Write the gradient over the logits in the backward pass instead of into a new tensor of the
            same size.  Safe only if nothing reads the logits after the backward pass has begun: the producer's
            backward must not need them (a matrix product does not; autograd raises an error otherwise), and backward
            can run only once.  Ignored for logits that are a parameter or a view of one.

    Returns:
        ``(log_prob_R, entropy_R)``; ``entropy_R`` is None without ``with_entropy``.
    """
    num_rows, shard = logits_TV.shape
    assert target_R.shape == ((num_rows,) if rows_R is None else rows_R.shape), (target_R.shape, logits_TV.shape)
    assert not isinstance(keep, Tensor) or keep.shape == (len(target_R), shard), (keep.shape, logits_TV.shape)
    base = logits_TV if logits_TV._base is None else logits_TV._base
    is_parameter = base.is_leaf and base.requires_grad
    first_id = shard * dist.get_rank(tp_group) if tp_group is not None else 0
    problem = _Problem(
        rows_R=torch.arange(num_rows, device=logits_TV.device) if rows_R is None else rows_R,
        local_target_R=target_R - first_id,
        tp_group=tp_group,
        rows_per_chunk=chunk_size if chunk_size > 0 else max(CHUNK_BYTES // (4 * shard), 1),
        keep=keep,
        temperature=temperature,
        num_columns=shard if vocab_size is None else min(max(vocab_size - first_id, 0), shard),
        kernels=_kernels_for(logits_TV) if keep is None else None,
    )
    log_prob_R, entropy_R = _LogProbs.apply(  # type: ignore[no-untyped-call]
        logits_TV, problem, with_entropy, with_entropy and entropy_grad, overwrite_logits and not is_parameter
    )
    return log_prob_R, entropy_R if with_entropy else None


class _Problem(NamedTuple):
    """Arguments of forward and backward other than the logits."""

    rows_R: Tensor
    local_target_R: Tensor
    tp_group: dist.ProcessGroup | None
    rows_per_chunk: int
    keep: Tensor | KeptTokens | None
    temperature: float
    num_columns: int
    """Columns of this shard that are tokens; the remaining columns are vocabulary padding."""
    kernels: ModuleType | None


class _Normaliser(NamedTuple):
    """Reductions of each row of scaled logits over the whole vocabulary."""

    log_sum_exp_R: Tensor
    target_logit_R: Tensor
    entropy_R: Tensor


class _LogProbs(torch.autograd.Function):
    """Log-probs.  Saves the logits and a few numbers per row; the backward pass recomputes the probabilities."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, problem: _Problem, with_entropy: bool, has_entropy_grad: bool, overwrite: bool
    ) -> tuple[Tensor, Tensor]:
        has_plain_pass = with_entropy and problem.keep is not None  # the entropy ignores ``keep``
        masked = _normalise(logits_TV, problem, with_entropy and not has_plain_pass)
        plain = _normalise(logits_TV, problem._replace(keep=None), True) if has_plain_pass else masked
        ctx.save_for_backward(logits_TV, masked.log_sum_exp_R, plain.log_sum_exp_R, plain.entropy_R)
        ctx.problem, ctx.has_entropy_grad, ctx.overwrite = problem, has_entropy_grad, overwrite
        if not has_entropy_grad:
            ctx.mark_non_differentiable(plain.entropy_R)
        return masked.target_logit_R - masked.log_sum_exp_R, plain.entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, masked_lse_R, plain_lse_R, entropy_R = ctx.saved_tensors
        problem: _Problem = ctx.problem
        # The detached logits share the version counter, so autograd detects any later reader in the backward pass.
        grad_TV = logits_TV.detach() if ctx.overwrite else torch.empty_like(logits_TV)
        grad_log_prob_R, grad_entropy_R = grads[0].contiguous(), grads[1].contiguous()
        if problem.kernels is not None:
            problem.kernels.write_gradient(
                logits_TV.detach(),
                grad_TV,
                rows_R=problem.rows_R,
                local_target_R=problem.local_target_R,
                log_sum_exp_R=masked_lse_R,
                grad_log_prob_R=grad_log_prob_R,
                entropy_R=entropy_R if ctx.has_entropy_grad else None,
                grad_entropy_R=grad_entropy_R,
                temperature=problem.temperature,
                num_columns=problem.num_columns,
            )
            grad_TV[:0].zero_()  # advances the version counter, which a Triton kernel does not
            return grad_TV, None, None, None, None
        num_buffers = 2 if ctx.has_entropy_grad else 1
        for rows in _row_blocks(len(problem.rows_R), problem.rows_per_chunk, num_buffers=num_buffers):
            target_K = problem.local_target_R[rows]
            grad_K = grad_log_prob_R[rows]
            # d log_prob / d z = onehot(target) - p, with p over the kept tokens
            grad_KV = _scaled_rows(logits_TV, problem, rows)
            _mask_rows(grad_KV, problem, rows)
            grad_KV.sub_(masked_lse_R[rows, None]).exp_().mul_(-grad_K[:, None])
            is_local_K, column_K = _local_columns(target_K, problem.num_columns)
            if problem.num_columns:
                grad_KV.scatter_add_(1, column_K[:, None], (grad_K * is_local_K)[:, None])
            if ctx.has_entropy_grad:
                # d entropy / d z = -p (log p + entropy) = entr(p) - p * entropy
                p_KV = _scaled_rows(logits_TV, problem, rows).sub_(plain_lse_R[rows, None]).exp_()
                weight_K = grad_entropy_R[rows]
                grad_KV.addcmul_(p_KV, (-weight_K * entropy_R[rows])[:, None])
                grad_KV.addcmul_(torch.special.entr(p_KV, out=p_KV), weight_K[:, None])
                del p_KV
            chunk_KV = grad_KV.div_(problem.temperature).to(grad_TV.dtype)
            grad_TV[:, : problem.num_columns].index_copy_(0, problem.rows_R[rows], chunk_KV)
            del grad_KV, chunk_KV
        is_other_T = torch.ones(len(grad_TV), dtype=torch.bool, device=grad_TV.device)
        is_other_T[problem.rows_R] = False
        grad_TV[is_other_T] = 0
        grad_TV[:, problem.num_columns :] = 0
        return grad_TV, None, None, None, None


def _normalise(logits_TV: Tensor, problem: _Problem, with_entropy: bool) -> _Normaliser:
    """Reduce every row of the local shard against its own maximum, then rescale to the global maximum and sum."""
    if problem.kernels is not None:
        max_R, sums_3R = problem.kernels.row_sums(
            logits_TV,
            rows_R=problem.rows_R,
            local_target_R=problem.local_target_R,
            with_entropy=with_entropy,
            temperature=problem.temperature,
            num_columns=problem.num_columns,
        )
    else:
        max_R, sums_3R = _row_sums(logits_TV, problem, with_entropy)
    if problem.tp_group is not None:
        local_max_R = max_R.clone()
        dist.all_reduce(max_R, op=dist.ReduceOp.MAX, group=problem.tp_group)
        shift_R = local_max_R - max_R
        if with_entropy:
            # A shard without kept tokens has the lowest float as maximum: the shift may overflow, and 0 * inf is NaN.
            sums_3R[2] -= torch.where(sums_3R[0] > 0, shift_R * sums_3R[0], 0.0)
            sums_3R[2] *= shift_R.exp()
        sums_3R[0] *= shift_R.exp()
        dist.all_reduce(sums_3R, group=problem.tp_group)
    log_sum_R = sums_3R[0].log()
    entropy_R = log_sum_R + sums_3R[2] / sums_3R[0] if with_entropy else torch.empty_like(max_R)
    return _Normaliser(max_R + log_sum_R, sums_3R[1], entropy_R)


def _row_sums(logits_TV: Tensor, problem: _Problem, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """Return the maximum [R] of each row of this shard, and sums [3, R] relative to it ([2, R] without entropy):

    0: sum exp(z - max);  1: the target's z on the rank that has it, 0 elsewhere;  2: -sum exp(z - max) (z - max).
    """
    num_rows = len(problem.rows_R)
    dtype = torch.promote_types(logits_TV.dtype, torch.float32)
    lowest = torch.finfo(dtype).min
    max_R = logits_TV.new_full((num_rows,), lowest, dtype=dtype)
    sums_3R = logits_TV.new_zeros((3 if with_entropy else 2, num_rows), dtype=dtype)
    if problem.num_columns == 0:
        return max_R, sums_3R
    for rows in _row_blocks(num_rows, problem.rows_per_chunk, num_buffers=1):
        z_KV = _scaled_rows(logits_TV, problem, rows)
        _mask_rows(z_KV, problem, rows)
        is_local_K, column_K = _local_columns(problem.local_target_R[rows], problem.num_columns)
        target_logit_K = z_KV.gather(1, column_K[:, None]).squeeze(1)
        sums_3R[1, rows] = torch.where(is_local_K, target_logit_K, 0.0)
        # If a row has no kept token in this shard, any finite maximum works.
        max_K = z_KV.amax(dim=1).clamp_min(lowest)
        max_R[rows] = max_K
        z_KV.sub_(max_K[:, None]).exp_()
        sums_3R[0, rows] = z_KV.sum(dim=1)
        if with_entropy:
            sums_3R[2, rows] = torch.special.entr(z_KV, out=z_KV).sum(dim=1)
        del z_KV
    return max_R, sums_3R


def _row_blocks(num_rows: int, rows_per_chunk: int, *, num_buffers: int) -> Iterator[slice]:
    """Yield row ranges such that ``num_buffers`` float32 copies of a range are no larger than a chunk."""
    rows = max(rows_per_chunk // num_buffers, 1)
    for start in range(0, num_rows, rows):
        yield slice(start, min(start + rows, num_rows))


def _scaled_rows(logits_TV: Tensor, problem: _Problem, rows: slice) -> Tensor:
    """Return a copy of a range of rows in the computation dtype, without padding and divided by the temperature."""
    rows_KV = logits_TV[:, : problem.num_columns].index_select(0, problem.rows_R[rows])
    z_KV = rows_KV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    return z_KV if problem.temperature == 1.0 else z_KV.div_(problem.temperature)


def _local_columns(local_target_K: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return which targets are in this shard, and for each target a column that is always safe to index."""
    is_local_K = (local_target_K >= 0) & (local_target_K < num_columns)
    return is_local_K, local_target_K.clamp(0, max(num_columns - 1, 0))


def _mask_rows(z_KV: Tensor, problem: _Problem, rows: slice) -> None:
    """Set the logits of tokens that are not in ``keep`` to -inf, in place; the target is always kept."""
    if problem.keep is None or problem.num_columns == 0:
        return
    if isinstance(problem.keep, KeptTokens):
        keep_KV = problem.keep.mask(rows, problem.num_columns)
    else:
        keep_KV = problem.keep[rows, : problem.num_columns].clone()
    is_local_K, column_K = _local_columns(problem.local_target_R[rows], problem.num_columns)
    keep_KV.scatter_(1, column_K[:, None], keep_KV.gather(1, column_K[:, None]) | is_local_K[:, None])
    z_KV.masked_fill_(keep_KV.logical_not_(), float("-inf"))


def _kernels_for(logits_TV: Tensor) -> ModuleType | None:
    """Return the fused kernels if they apply: CUDA, at most float32, contiguous columns, and Triton installed."""
    if not logits_TV.is_cuda or logits_TV.dtype == torch.float64 or logits_TV.stride(1) != 1:
        return None
    try:
        from slime.algorithms import log_probs_kernels
    except ImportError:
        return None
    return log_probs_kernels


def logits_of(
    logits_TV: Tensor, rows_R: Tensor, ids_RK: Tensor, *, tp_group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the logits [R, K] of K tokens in each row, in float32; differentiable.

    Args:
        logits_TV: This rank's columns; rank k of the group has the ids ``[k * V, (k+1) * V)``.
        rows_R: int64 rows.
        ids_RK: int64 ids in the whole vocabulary.
        tp_group: The tensor-parallel group; None if this rank has the whole vocabulary.
    """
    shard = logits_TV.shape[-1]
    columns_RK = ids_RK - (dist.get_rank(tp_group) * shard if tp_group is not None else 0)
    is_here_RK = (columns_RK >= 0) & (columns_RK < shard)
    values_RK = logits_TV[rows_R[:, None], columns_RK.clamp(0, shard - 1)].float()
    values_RK = torch.where(is_here_RK, values_RK, 0.0)
    return values_RK if tp_group is None else _SumOverShards.apply(values_RK, tp_group)  # type: ignore[no-untyped-call]


class _SumOverShards(torch.autograd.Function):
    """All-reduce of values that are nonzero on one shard only; the gradient of every shard is the full gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
