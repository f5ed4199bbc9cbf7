"""Triton kernel of ``slime.backends.megatron_utils.layers.row_copies``: the sum of each row's copies in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 2048
"""Most columns of a row that one program sums."""


@triton.jit
def _sum_kernel(
    x_ptr, out_ptr, copies_ptr, offsets_ptr, width,
    BLOCK: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < width
    total = tl.zeros([BLOCK], dtype=SUM)
    for number in range(tl.load(offsets_ptr + row), tl.load(offsets_ptr + row + 1)):
        copy = tl.load(copies_ptr + number)
        total += tl.load(x_ptr + copy * width + column, mask=is_inside, other=0.0).to(SUM)
    tl.store(out_ptr + row * width + column, total, mask=is_inside)


def launch_sum(x: Tensor, copies_by_row: Tensor, offsets: Tensor) -> Tensor:
    """Sum the copies of each row, see ``row_copies.sum_copies``.

    Args:
        x: [C, ...].
        copies_by_row, offsets: int64 [C] and [N + 1] of a ``RowCopies``.

    Returns:
        contiguous [N, ...].
    """
    x = x.contiguous()
    num_rows, width = len(offsets) - 1, x[0].numel() if len(x) else 0
    out = torch.empty((num_rows, *x.shape[1:]), dtype=x.dtype, device=x.device)
    if not width:
        return out.zero_()
    block = min(triton.next_power_of_2(width), MAX_BLOCK)
    if num_rows:
        _sum_kernel[(num_rows, triton.cdiv(width, block))](
            x, out, copies_by_row, offsets, width,
            BLOCK=block, SUM=tl.float64 if x.dtype == torch.float64 else tl.float32,
        )  # fmt: skip
    return out
