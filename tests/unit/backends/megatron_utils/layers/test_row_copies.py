"""Copies of rows and their sums: values by hand, gradients, and sums in fp32."""

from __future__ import annotations

import torch

from slime.backends.megatron_utils.layers.row_copies import RowCopies, copy_rows, sum_copies

ROWS = [2, 0, 2, 3, 2]
"""Source row of each copy; row 1 of 4 has none."""


def test_hand_values() -> None:
    copies = RowCopies.of(torch.tensor(ROWS), 4)
    assert copies.copies_by_row.tolist() == [1, 0, 2, 4, 3] and copies.offsets.tolist() == [0, 1, 1, 4, 5]
    assert copy_rows(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), copies).tolist() == [[3], [1], [3], [4], [3]]
    assert sum_copies(torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]]), copies).tolist() == [[2], [0], [21], [8]]


def test_nothing_is_copied_of_rows_without_copies() -> None:
    copies = RowCopies.of(torch.empty(0, dtype=torch.int64), 2)
    assert copy_rows(torch.ones(2, 3), copies).shape == (0, 3)
    assert sum_copies(torch.ones(0, 3), copies).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_each_is_the_gradient_of_the_other() -> None:
    copies = RowCopies.of(torch.tensor(ROWS), 4)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, 2, 3, dtype=torch.float64, generator=draw).requires_grad_()
    y = torch.randn(5, 2, 3, dtype=torch.float64, generator=draw).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: copy_rows(x, copies), x)
    assert torch.autograd.gradcheck(lambda y: sum_copies(y, copies), y)


def test_bf16_is_summed_in_fp32() -> None:
    # 256 + 1 + 1: in bf16 each step rounds back to 256, in fp32 the sum is 258.
    copies = RowCopies.of(torch.zeros(3, dtype=torch.int64), 1)
    x = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert sum_copies(x, copies).item() == 258.0
    row = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    copy_rows(row, copies).backward(x)
    assert row.grad is not None and row.grad.item() == 258.0
