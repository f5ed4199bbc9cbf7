"""The formula of adapters, by hand."""

from __future__ import annotations

import torch

from slime.ext.lora.formula import merged, widened

A = torch.tensor([[[1.0, 2.0]], [[10.0, 20.0]]])
"""Two parts of rank 1 over two columns."""
B = torch.tensor([[3.0], [5.0], [7.0]])
PART_OF_ROW = torch.tensor([1, 0, -1])


def test_a_row_stands_in_the_columns_of_its_part() -> None:
    assert widened(B, PART_OF_ROW, 2).tolist() == [[0, 3], [5, 0], [0, 0]]


def test_rows_meet_the_matrix_of_their_part_and_rows_without_one_stay() -> None:
    weight = torch.ones(3, 2)
    assert merged(weight, A, B, PART_OF_ROW, scale=0.5).tolist() == [[16, 31], [3.5, 6], [1, 1]]


def test_a_bf16_weight_is_rounded_once() -> None:
    weight, a = torch.full((1, 1), 256.0, dtype=torch.bfloat16), torch.full((1, 2, 1), 1.0, dtype=torch.bfloat16)
    b = torch.full((1, 2), 0.5, dtype=torch.bfloat16)  # 256 + 0.5 + 0.5, where bf16 represents only even numbers
    assert merged(weight, a, b, None, scale=1.0).item() == 256
    assert merged(weight, a, b, None, scale=2.0).item() == 258
