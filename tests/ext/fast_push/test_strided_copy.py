"""Strided copies against torch's slicing, on tensors small enough to check every element."""

from __future__ import annotations

import itertools

import pytest
import torch

from slime.ext.fast_push.strided_copy import (
    NotRectangularError,
    StridedCopy,
    StridedSlice,
    clip,
    merged,
    slice_written,
)
from slime.weights.tensor_slice import TensorSlice


def copy_between(to: torch.Tensor, frm: torch.Tensor) -> StridedCopy:
    """The effect of ``to.copy_(frm)`` on the memory of both."""
    frm = frm.expand(to.shape)
    return StridedCopy(tuple(to.shape), to.storage_offset(), to.stride(), frm.storage_offset(), frm.stride())


def run(copies: list[StridedCopy], memory: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    for copy in copies:
        source = flat.as_strided(copy.shape, copy.from_strides, copy.from_offset)
        memory.as_strided(copy.shape, copy.to_strides, copy.to_offset).copy_(source)
    return memory


VIEWS = {
    "whole": lambda t: t,
    "rows": lambda t: t[3:9],
    "a column slice": lambda t: t[:, 2:5],
    "every other row": lambda t: t[1::2],
    "transposed": lambda t: t.t(),
    "transposed slice": lambda t: t[2:8, 1:5].t(),
    "one row": lambda t: t[5],
    "one element": lambda t: t[5, 3:4],
    "heads": lambda t: t.view(3, 4, 6),
    "interleaved heads": lambda t: t.view(3, 4, 6)[:, 1:3],
    "heads in another order": lambda t: t.view(3, 4, 6).transpose(0, 1),
    "flattened": lambda t: t.reshape(-1),
    "half of it flattened": lambda t: t.reshape(-1)[: 6 * 6],
    "repeated": lambda t: t[4].expand(5, 6),
}


@pytest.mark.parametrize("name", VIEWS)
def test_clipped_copies_are_the_whole_copy(name):
    """Any slices that cover the tensor, each stored elsewhere, give the same as the tensor itself."""
    source = torch.arange(12 * 6).view(12, 6)
    view = VIEWS[name](source)
    expected = torch.full((200,), -1)
    target = expected.as_strided(view.shape, StridedSlice.whole(view.shape).strides, 7)
    copy = copy_between(target, view)
    target.copy_(view)
    memory = torch.full((200,), -1)
    for (row, height), (column, width) in itertools.product([(0, 5), (5, 7)], [(0, 2), (2, 4)]):
        stored = source[row : row + height, column : column + width].reshape(-1)
        cuts = clip(
            copy, StridedSlice.whole(source.shape), StridedSlice.packed(TensorSlice((row, column), (height, width)))
        )
        run(cuts, memory, stored)
    assert torch.equal(memory, expected)


def test_a_diagonal_is_no_slice():
    copy = StridedCopy((6,), 0, (1,), 0, (7,))
    with pytest.raises(NotRectangularError):
        clip(copy, StridedSlice.whole((12, 6)), StridedSlice.packed(TensorSlice((0, 0), (12, 6))))


def test_merging_leaves_few_dimensions():
    tensor = torch.zeros(4, 3, 5)
    assert merged(copy_between(torch.zeros(4, 3, 5), tensor)).shape == (60,)
    assert merged(copy_between(torch.zeros(4, 3, 5)[:, :2], tensor[:, :2])).shape == (4, 10)
    assert merged(copy_between(torch.zeros(3, 4, 5), tensor.transpose(0, 1))).shape == (3, 4, 5)
    assert merged(copy_between(torch.zeros(1, 5), tensor[2, 1])).shape == (5,)


@pytest.mark.parametrize(
    ("name", "start", "shape"),
    [
        ("rows", (3, 0), (6, 6)),
        ("a column slice", (0, 2), (12, 3)),
        ("transposed slice", (2, 1), (6, 4)),
        ("one row", (5, 0), (1, 6)),
        ("heads", (0, 0), (12, 6)),
        ("flattened", (0, 0), (12, 6)),
    ],
)
def test_the_slice_that_a_copy_writes(name, start, shape):
    target = torch.zeros(12, 6)
    view = VIEWS[name](target)
    source = torch.arange(view.numel()).view(view.shape)
    held = slice_written(copy_between(view, source), StridedSlice.whole((12, 6)))
    assert (held.slice.offsets, held.slice.sizes) == (start, shape)
    view.copy_(source)
    part = target[start[0] : start[0] + shape[0], start[1] : start[1] + shape[1]]
    assert torch.equal(source.reshape(-1).as_strided(held.shape, held.strides, held.offset).float(), part)


def test_what_is_no_single_slice_is_said_to_be_none():
    target = torch.zeros(12, 6)
    for view in (target[::2], target.view(3, 4, 6)[:, 1:3]):
        with pytest.raises(NotRectangularError):
            slice_written(copy_between(view, torch.zeros(view.shape)), StridedSlice.whole((12, 6)))
