"""Rectangles split into matrices and tiles contain each element once, at the same place."""

from __future__ import annotations

import itertools
import random

import pytest

from slime.ext.fast_push.kernels.copy_2d import Copy2D, as_lines, in_words, matrices


def places(found: list[Copy2D], src_size: int, dst_size: int) -> list[tuple[int, int]]:
    """Where each element is at the source and at the destination, in bytes."""
    return sorted(
        (
            m.src + src_size * (row * m.src_strides[0] + column * m.src_strides[1]),
            m.dst + dst_size * (row * m.dst_strides[0] + column * m.dst_strides[1]),
        )
        for m in found
        for row in range(m.rows)
        for column in range(m.columns)
    )


@pytest.mark.parametrize("seed", range(30))
def test_matrices_have_every_element_of_the_rectangle(seed: int):
    choose = random.Random(seed)
    shape = [choose.choice([1, 2, 3, 5]) for _ in range(choose.randint(0, 4))]
    order = choose.sample(range(len(shape)), len(shape))
    strides = []
    for is_dense in (choose.random() < 0.5, choose.random() < 0.5):
        step, one = 1, [0] * len(shape)
        for axis in reversed(order if choose.random() < 0.3 else range(len(shape))):
            one[axis] = step
            step *= shape[axis] + (0 if is_dense else choose.choice([0, 1, 3]))
        strides.append(one)
    found = list(matrices(shape, 100, strides[0], 2, 1000, strides[1], 4))
    wanted = sorted(
        (
            100 + 2 * sum(i * s for i, s in zip(index, strides[0])),
            1000 + 4 * sum(i * s for i, s in zip(index, strides[1])),
        )
        for index in itertools.product(*map(range, shape))
    )
    assert places(found, 2, 4) == wanted
    assert places([line for m in found for line in as_lines(m, 2, 4)], 2, 4) == wanted


def test_aligned_rows_become_words():
    words = in_words(Copy2D(32, (64, 1), 64, (32, 1), 5, 24), 2)
    assert words == [Copy2D(32, (32, 1), 64, (16, 1), 5, 12)]


def test_a_long_row_becomes_lines_and_a_rest():
    lines, rest = in_words(Copy2D(0, (0, 1), 16, (0, 1), 1, 2 * 1000), 4) or []
    assert (lines.rows, lines.columns, lines.src_strides) == (3, 512, (512, 1))
    assert (rest.src, rest.dst, rest.rows, rest.columns) == (3 * 2048, 16 + 3 * 2048, 1, 2000 - 1536)
