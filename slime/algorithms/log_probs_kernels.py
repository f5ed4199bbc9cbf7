"""Triton kernels for ``log_probs``, which read each row of the logits once per pass and write only the gradient.

They compute the same as ``log_probs._row_sums`` and the loop of its backward pass, which remain the reference; GPU
tests compare them.  Importing this module requires Triton, which CUDA builds of torch include.

Shapes as in ``log_probs``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
BLOCK = 4096
"""Columns processed at a time by one program; 16 per thread."""
NUM_WARPS = 8


@triton.jit
def _row_sums_kernel(
    logits_ptr,
    row_stride,
    rows_ptr,
    target_ptr,
    max_ptr,
    sums_ptr,
    num_rows,
    num_columns,
    temperature,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduce one row per program.  Every lane keeps its own running maximum and sums, combined once at the end."""
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)  # sum of p * (z - top), p = exp(z - top)
    for start in range(0, num_columns, BLOCK):
        column = start + lane
        z = tl.load(row_ptr + column, mask=column < num_columns, other=float("-inf")).to(tl.float32) / temperature
        new_top = tl.maximum(top, z)
        shift = top - new_top
        scale = tl.exp(shift)
        p = tl.exp(z - new_top)
        if WITH_ENTROPY:
            moved = tl.where(total > 0, scale * (weighted + shift * total), 0.0)
            weighted = moved + tl.where(p > 0, p * (z - new_top), 0.0)
        total = total * scale + p
        top = new_top
    row_top = tl.max(top, axis=0)
    shift = top - row_top
    scale = tl.exp(shift)
    target = tl.load(target_ptr + index)
    is_local = (target >= 0) & (target < num_columns)
    target_logit = tl.load(row_ptr + target, mask=is_local, other=0.0).to(tl.float32) / temperature
    tl.store(max_ptr + index, row_top)
    tl.store(sums_ptr + index, tl.sum(total * scale, axis=0))
    tl.store(sums_ptr + num_rows + index, target_logit)
    if WITH_ENTROPY:
        moved = tl.where(total > 0, scale * (weighted + shift * total), 0.0)
        tl.store(sums_ptr + 2 * num_rows + index, -tl.sum(moved, axis=0))


@triton.jit
def _gradient_kernel(
    logits_ptr,
    logits_stride,
    grad_ptr,
    grad_stride,
    slot_ptr,
    target_ptr,
    lse_ptr,
    grad_log_prob_ptr,
    entropy_ptr,
    grad_entropy_ptr,
    num_columns,
    shard,
    num_blocks,
    temperature,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of one row and block of columns.  It is elementwise, so it may overwrite the logits."""
    program = tl.program_id(0)
    row = (program // num_blocks).to(tl.int64)
    column = (program % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + row)
    grad = tl.zeros([BLOCK], tl.float32)
    if slot >= 0:
        z = tl.load(logits_ptr + row * logits_stride + column, mask=column < num_columns, other=float("-inf"))
        log_p = z.to(tl.float32) / temperature - tl.load(lse_ptr + slot)
        p = tl.exp(log_p)
        weight = tl.load(grad_log_prob_ptr + slot)
        grad = tl.where(column == tl.load(target_ptr + slot), weight, 0.0) - p * weight
        if WITH_ENTROPY:
            entropy = tl.load(entropy_ptr + slot)
            slope = tl.where(p > 0, p * (log_p + entropy), 0.0)
            grad -= tl.load(grad_entropy_ptr + slot) * slope
        grad = tl.where(column < num_columns, grad / temperature, 0.0)
    pointer = grad_ptr + row * grad_stride + column
    tl.store(pointer, grad.to(grad_ptr.dtype.element_ty), mask=column < shard)


def _device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Return the context for launching kernels; Triton's interpreter runs on CPU tensors and needs no device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def row_sums(
    logits_TV: Tensor,
    *,
    rows_R: Tensor,
    local_target_R: Tensor,
    with_entropy: bool,
    temperature: float,
    num_columns: int,
) -> tuple[Tensor, Tensor]:
    """Compute ``log_probs._row_sums``: each row's maximum, and sums relative to it (0 if ``num_columns`` is 0)."""
    num_rows = len(rows_R)
    max_R = logits_TV.new_empty(num_rows, dtype=torch.float32)
    sums_3R = logits_TV.new_zeros((3 if with_entropy else 2, num_rows), dtype=torch.float32)
    if num_rows:
        with _device_of(logits_TV):
            _row_sums_kernel[(num_rows,)](
                logits_TV,
                logits_TV.stride(0),
                rows_R.contiguous(),
                local_target_R.contiguous(),
                max_R,
                sums_3R,
                num_rows,
                num_columns,
                float(temperature),
                WITH_ENTROPY=with_entropy,
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )
    return max_R, sums_3R


def write_gradient(
    logits_TV: Tensor,
    grad_TV: Tensor,
    *,
    rows_R: Tensor,
    local_target_R: Tensor,
    log_sum_exp_R: Tensor,
    grad_log_prob_R: Tensor,
    entropy_R: Tensor | None,
    grad_entropy_R: Tensor,
    temperature: float,
    num_columns: int,
) -> None:
    """Fill ``grad_TV``, which may be ``logits_TV`` itself, with the gradient; rows not in ``rows_R`` get 0.

    Args:
        logits_TV: At most fp32, with contiguous columns.
        grad_TV: Same shape and dtype as ``logits_TV``.
        rows_R: Requested rows.
        local_target_R: Column of each row's target; outside the shard on ranks that do not have it.
        log_sum_exp_R: fp32, over the whole vocabulary.
        grad_log_prob_R: Gradient of the log-probs.
        entropy_R: Entropy of each row; None if the entropy carries no gradient.
        grad_entropy_R: Gradient of the entropy; ignored if ``entropy_R`` is None.
        temperature: Divides the logits.
        num_columns: Columns from this index on are padding and get a gradient of 0.
    """
    num_rows, shard = logits_TV.shape
    if num_rows == 0:
        return
    slot_T = rows_R.new_full((num_rows,), -1)
    slot_T[rows_R] = torch.arange(len(rows_R), device=rows_R.device)
    num_blocks = triton.cdiv(shard, BLOCK)
    with _device_of(logits_TV):
        _gradient_kernel[(num_rows * num_blocks,)](
            logits_TV,
            logits_TV.stride(0),
            grad_TV,
            grad_TV.stride(0),
            slot_T,
            local_target_R.contiguous(),
            log_sum_exp_R.contiguous(),
            grad_log_prob_R.float(),
            log_sum_exp_R if entropy_R is None else entropy_R.contiguous(),
            grad_entropy_R.float(),
            num_columns,
            shard,
            num_blocks,
            float(temperature),
            WITH_ENTROPY=entropy_R is not None,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
