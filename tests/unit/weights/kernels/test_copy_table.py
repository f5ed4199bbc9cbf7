"""The copy table on the CPU: strides on both sides, casts, comparison byte by byte."""

from __future__ import annotations

import re

import pytest
import torch

from slime.weights.kernels.copy_table import CopyItem, CopyTable
from tests.unit.weights.kernels.table_cases import COPY_BYTES, copy_items


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_slices_of_a_bucket_land_in_a_fused_parameter():
    up, gate = torch.arange(12.0).view(3, 4), 100 + torch.arange(12.0).view(3, 4)
    flat = torch.cat([as_bytes(gate), as_bytes(up)])
    fused = torch.zeros(4, 4)
    # The second of three tensor-parallel parts has the middle row of each; columns 1 and 2 only of the last.
    items = [
        CopyItem(fused[0], 16, (1,), torch.float32),
        CopyItem(fused[1], 48 + 16, (1,), torch.float32),
        CopyItem(fused[2:4, 1:3], 48 + 4, (4, 1), torch.float32),
    ]
    CopyTable(items).copy(flat)
    assert fused.tolist() == [[104, 105, 106, 107], [4, 5, 6, 7], [0, 1, 2, 0], [0, 5, 6, 0]]


def test_a_transposed_source_and_a_cast():
    flat = as_bytes(torch.arange(6.0).view(2, 3))
    held = torch.zeros(3, 2, dtype=torch.bfloat16)
    CopyTable([CopyItem(held, 0, (1, 3), torch.float32)]).copy(flat)
    assert held.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_every_case_equals_what_it_was_copied_from():
    flat = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    items = copy_items("cpu", flat)
    table = CopyTable(items)
    before = table.count_differences(flat)
    table.copy(flat)
    assert before.sum() > 1000 and table.count_differences(flat).sum() == 0


def test_differences_are_bytes_after_the_cast():
    flat = as_bytes(torch.tensor([1.0, 2.0, 3.0]))
    held = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    table = CopyTable([CopyItem(held, 0, (1,), torch.float32), CopyItem(torch.zeros(2), 0, (1,), torch.float32)])
    # 1.0 is 3f800000, 2.0 is 40000000.
    assert table.count_differences(flat).tolist() == [0, 3]
    held.view(torch.uint8)[3] ^= 0x80
    assert table.count_differences(flat).tolist() == [1, 3]


def test_equal_numbers_with_other_bits_differ():
    flat = as_bytes(torch.tensor([0.0, float("nan")]))
    held = torch.tensor([-0.0, float("nan")])
    assert CopyTable([CopyItem(held, 0, (1,), torch.float32)]).count_differences(flat).tolist() == [1]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (CopyItem(torch.zeros(2, 2), 0, (1,), torch.float32), "1 strides for 2 dimensions"),
        (CopyItem(torch.zeros(2), 0, (-1,), torch.float32), "negative strides [-1]"),
        (CopyItem(torch.zeros(2), 6, (1,), torch.float32), "the offset 6 is no multiple"),
    ],
)
def test_an_item_that_cannot_work_is_refused(item: CopyItem, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        CopyTable([item])


def test_a_bucket_that_ends_before_the_last_element_is_refused():
    table = CopyTable([CopyItem(torch.zeros(2, 3), 8, (10, 2), torch.float32)])
    assert table.num_bytes == 8 + 4 * (10 + 4 + 1)
    with pytest.raises(ValueError, match="the bucket has 67 bytes; the items of this table need 68"):
        table.copy(torch.zeros(67, dtype=torch.uint8))


def test_an_empty_table_does_nothing():
    assert CopyTable([]).count_differences(torch.zeros(0, dtype=torch.uint8)).tolist() == []
