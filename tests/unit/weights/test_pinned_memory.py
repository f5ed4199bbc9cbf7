"""Tensors that share one block of host memory."""

from __future__ import annotations

import torch

from slime.weights.pinned_memory import ALIGNMENT, host_bytes, host_tensors_like


def test_tensors_of_one_block_have_the_shapes_and_overlap_nowhere() -> None:
    tensors = {
        "odd": torch.zeros(3, 5, dtype=torch.uint8),
        "scalar": torch.tensor(1.0),
        "empty": torch.zeros(0, 4, dtype=torch.int64),
        "turned": torch.zeros(2, 7, dtype=torch.bfloat16).t(),
    }
    copies = host_tensors_like(tensors, is_pinned=False)
    assert [(one.dtype, one.shape) for one in copies.values()] == [(one.dtype, one.shape) for one in tensors.values()]
    assert len({one.untyped_storage().data_ptr() for one in copies.values()}) == 1
    assert all(one.storage_offset() * one.itemsize % ALIGNMENT == 0 for one in copies.values())
    for value, one in enumerate(copies.values(), 1):
        one.fill_(value)
    assert [one.unique().tolist() for one in copies.values()] == [[1], [2.0], [], [4.0]]


def test_host_memory_begins_as_zeros() -> None:
    assert host_bytes(4097, is_pinned=False).tolist() == [0] * 4097
    assert host_tensors_like({}, is_pinned=False) == {}
