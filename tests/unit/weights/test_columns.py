"""Lists as their distinct items and a column of numbers."""

from __future__ import annotations

from slime.weights.columns import numbered


def test_items_are_numbered_as_they_first_come():
    assert numbered("banana") == (["b", "a", "n"], [0, 1, 2, 1, 2, 1])
    assert numbered([]) == ([], [])


def test_equal_items_have_one_number():
    distinct, column = numbered([(1, 2), (3,), (1, 2)])
    assert [distinct[number] for number in column] == [(1, 2), (3,), (1, 2)] and len(distinct) == 2
