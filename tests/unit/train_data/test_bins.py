"""First fit, largest differencing, splitting: values by hand, then equality with the plain algorithm."""

import random

import pytest

from slime.train_data.bins import first_fit, karmarkar_karp, split_until
from slime.utils.errors import DataError


@pytest.mark.parametrize(
    ("lengths", "capacity", "bins"),
    [
        ([100, 200, 300], 300, [[0, 1], [2]]),
        ([900, 100, 500, 450, 50, 1200, 300], 1000, [[0, 1], [2, 3, 4], [5], [6]]),
        ([], 10, []),
        ([11, 12], 10, [[0], [1]]),
        ([11, 0, 10], 10, [[0], [1, 2]]),
    ],
)
def test_first_fit_matches_hand_computed_bins(lengths, capacity, bins):
    assert first_fit(lengths, capacity) == bins


@pytest.mark.parametrize(
    ("weights", "k", "equal_size", "parts"),
    [
        (list(range(10, 90, 10)), 2, True, [[1, 2, 4, 7], [0, 3, 5, 6]]),
        (list(range(10, 90, 10)), 3, False, [[1, 4, 5], [0, 3, 6], [2, 7]]),
        ([5, 5, 6, 7, 8], 2, False, [[0, 1, 3], [2, 4]]),
    ],
)
def test_differencing_matches_golden_parts(weights, k, equal_size, parts):
    assert karmarkar_karp(weights, k, equal_size=equal_size) == parts


def plain_karmarkar_karp(weights, k, equal_size):
    """Each state holds all k subsets, including empty ones; sorting all states finds the next two."""
    order = sorted(range(len(weights)), key=lambda index: (weights[index], index))
    chunks = [order[i : i + k] for i in range(0, len(order), k)] if equal_size else [[i] for i in range(len(weights))]
    states = []
    for chunk in chunks:
        states.append(sorted([(weights[i], 1, [i]) for i in chunk] + [(0, 0, [])] * (k - len(chunk)), reverse=True))
    while len(states) > 1:
        states.sort(key=lambda state: (state[0][0] - state[-1][0], state[0]), reverse=True)
        first, second, *rest = states
        merged = [(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in zip(first, reversed(second), strict=True)]
        states = [sorted(merged, reverse=True), *rest]
    return [sorted(items) for _, _, items in states[0]]


@pytest.mark.parametrize("seed", range(40))
def test_differencing_equals_the_plain_algorithm_ties_included(seed):
    rng = random.Random(seed)
    k = rng.randint(1, 12)
    largest = rng.choice([2, 9, 10**9])
    weights = [rng.randint(1, largest) for _ in range(k * rng.randint(1, 12))]
    for equal_size in (False, True):
        assert karmarkar_karp(weights, k, equal_size=equal_size) == plain_karmarkar_karp(weights, k, equal_size)


@pytest.mark.parametrize(("count", "k", "equal_size"), [(2, 3, False), (5, 2, True)])
def test_parts_that_cannot_be_filled_are_refused(count, k, equal_size):
    with pytest.raises(DataError, match=f"{count} items cannot fill {k}"):
        karmarkar_karp([1] * count, k, equal_size=equal_size)


def test_heaviest_bins_are_split_until_there_are_enough():
    lengths = [10, 20, 30, 40]
    # [2, 3] is heaviest: 40 stays in place, 30 moves to the end
    assert split_until([[0, 1], [2, 3]], lengths, 3) == [[0, 1], [3], [2]]
    assert split_until([[0, 1], [2, 3]], lengths, 4) == [[1], [3], [2], [0]]


def test_more_bins_than_samples_are_refused():
    with pytest.raises(DataError, match="cannot be spread over 3 micro-batches"):
        split_until([[0, 1]], [1, 1], 3)
