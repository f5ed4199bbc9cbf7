"""Copies rows of a tensor, each any number of times, and sums the copies of each row.

Each operation is the gradient of the other.  Sums are computed in fp32 (fp64 for fp64), in the order of the copies, so
they are deterministic; torch sums the gradients of an ``index_select`` in the dtype of the rows, in any order.

Shapes: N = rows, C = copies of all rows together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowCopies:
    """Describes the copies of N rows; built on the device without host synchronization."""

    row_of_copy: Tensor
    """int64 [C], in [0, N)."""
    copies_by_row: Tensor
    """int64 [C], the copies of row 0, then those of row 1, ..."""
    offsets: Tensor
    """int64 [N + 1]: the copies of row i are ``copies_by_row[offsets[i]:offsets[i + 1]]``."""

    @classmethod
    def of(cls, row_of_copy: Tensor, num_rows: int) -> RowCopies:
        rows, copies_by_row = row_of_copy.sort(stable=True)
        offsets = torch.searchsorted(rows, torch.arange(num_rows + 1, device=rows.device))
        return cls(row_of_copy, copies_by_row, offsets)


def copy_rows(x: Tensor, copies: RowCopies) -> Tensor:
    """Map x [N, ...] to the copies of its rows, [C, ...]."""
    copied: Tensor = _CopyRows.apply(x, copies.row_of_copy, copies.copies_by_row, copies.offsets)
    return copied


def sum_copies(x: Tensor, copies: RowCopies) -> Tensor:
    """Map x [C, ...] to the sum of each row's copies, [N, ...] in the dtype of ``x``; rows without copies are zero."""
    summed: Tensor = _SumCopies.apply(x, copies.row_of_copy, copies.copies_by_row, copies.offsets)
    return summed


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row_of_copy: Tensor, copies_by_row: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_copy, copies_by_row, offsets)
        return x.index_select(0, row_of_copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _sum(grad, *ctx.saved_tensors), None, None, None


class _SumCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row_of_copy: Tensor, copies_by_row: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_copy)
        return _sum(x, row_of_copy, copies_by_row, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.index_select(0, *ctx.saved_tensors), None, None, None


def _sum(x: Tensor, row_of_copy: Tensor, copies_by_row: Tensor, offsets: Tensor) -> Tensor:
    if x.is_cuda:
        from slime.backends.megatron_utils.layers.row_copies_kernel import launch_sum

        return launch_sum(x, copies_by_row, offsets)
    sums = torch.promote_types(x.dtype, torch.float32)
    summed = x.new_zeros(len(offsets) - 1, *x.shape[1:], dtype=sums)
    return summed.index_add_(0, row_of_copy, x.to(sums)).to(x.dtype)
