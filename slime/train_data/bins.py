"""Bin packing and partitioning of lengths: first fit, largest differencing, and splitting one bin.

All functions take and return indices and do not depend on what is being packed.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence
from typing import TypeAlias

from slime.utils.errors import DataError


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack indices of ``lengths`` in arrival order, each into the first bin that still has room.

    A length above ``capacity`` gets its own bin.  A tournament tree over the room left in each bin finds the first bin
    with room, so n lengths take O(n log n) instead of O(n * bins).
    """
    # Leaf b holds the room left in bin b; an inner node holds the larger value of its children; node 1 is the root.
    # Unopened bins have full room, so opening a new bin needs no special case: it is the leftmost bin that fits.
    num_leaves = 1
    room = [0, capacity]
    bins: list[list[int]] = []
    for index, length in enumerate(lengths):
        if len(bins) == num_leaves:
            num_leaves *= 2
            room = _doubled(room, capacity)
        if length > capacity:
            node = num_leaves + len(bins)
            room[node] = -1
        else:
            node = 1
            while node < num_leaves:
                node *= 2
                if room[node] < length:
                    node += 1
            room[node] -= length
        chosen = node - num_leaves
        if chosen == len(bins):
            bins.append([index])
        else:
            bins[chosen].append(index)
        while node > 1:
            larger = max(room[node], room[node ^ 1])
            node //= 2
            if room[node] == larger:
                break
            room[node] = larger
    return bins


def _doubled(room: list[int], capacity: int) -> list[int]:
    """Return the tree with twice the leaves: the old tree on the left, unopened bins on the right."""
    half = len(room) // 2
    doubled = [capacity] * (4 * half)
    level = 1
    while level <= half:
        doubled[2 * level : 3 * level] = room[level : 2 * level]
        level *= 2
    return doubled


_Subset: TypeAlias = tuple[float, int, list[int]]
"""(weight, number of items, items), compared in this order; disjoint subsets never compare equal."""

_Partial: TypeAlias = list[_Subset]
"""A partial partition into k subsets: its non-empty subsets, lightest first.  The others are empty."""


def karmarkar_karp(weights: Sequence[float], k: int, *, equal_size: bool = False) -> list[list[int]]:
    """Split indices of ``weights`` into k parts of nearly equal total weight, with the largest differencing method.

    Repeatedly merges the two partial partitions with the largest spread, joining the heaviest subset of one with the
    lightest of the other, until one partition is left.  Takes about O(n log n) for n items, independent of k.

    Args:
        weights: One non-negative number per item.
        k: Number of parts.
        equal_size: Give every part the same number of items.

    Returns:
        k lists of indices, each ascending.

    Raises:
        DataError: there are fewer items than parts, ``equal_size`` and k does not divide the number of items, or zero
            weights left a part empty.

    Source: Karmarkar and Karp, "The differencing method of set partitioning", UCB/CSD 82/113, 1982.
    """
    if k < 1 or len(weights) < k:
        raise DataError(f"{len(weights)} items cannot fill {k} non-empty parts; lower the number of ranks or bins")
    if equal_size and len(weights) % k:
        raise DataError(f"{len(weights)} items cannot fill {k} parts of equal size; it must be a multiple")

    if equal_size:
        order = sorted(range(len(weights)), key=lambda index: (weights[index], index))
        chunks = [order[start : start + k] for start in range(0, len(order), k)]
        partials = [[(weights[index], 1, [index]) for index in chunk] for chunk in chunks]
    else:
        partials = [[(weight, 1, [index])] for index, weight in enumerate(weights)]
    heap = [_heap_entry(partial, k) for partial in partials]
    heapq.heapify(heap)
    while len(heap) > 1:
        first = heapq.heappop(heap)[-1]
        second = heap[0][-1]
        heapq.heapreplace(heap, _heap_entry(_merge(first, second, k), k))
    subsets = heap[0][-1]
    if len(subsets) < k:  # possible only with zero weights, which weigh no more than an empty subset
        raise DataError(f"the weights {list(weights)[:8]} left one of {k} parts empty; weights must be positive")
    return [sorted(items) for _, _, items in reversed(subsets)]


def _heap_entry(partial: _Partial, k: int) -> tuple[float, float, int, int, _Partial]:
    """Return ``partial`` preceded by its heap key: largest spread first, then heaviest heaviest subset.

    The key uses plain numbers, which compare much faster than objects with custom comparison.  Heaviest subsets of
    equal weight and size differ in their first item, because they are disjoint.
    """
    weight, count, items = partial[-1]
    lightest = partial[0][0] if len(partial) == k else 0
    return lightest - weight, -weight, -count, -items[0], partial


_FEW = 16
"""Insert items one by one if the other list is this many times longer; otherwise sort."""


def _merge(first: _Partial, second: _Partial, k: int) -> _Partial:
    """Merge two partitions, joining the heaviest subset of one with the lightest of the other; consumes both.

    Empty subsets count as lightest, so only the ``overlap`` lightest non-empty subsets of each side have a non-empty
    partner.  The longer list is kept and the other subsets are inserted into it: the usual merge, of many subsets with
    a single one, then moves a few pointers instead of sorting k subsets.
    """
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    overlap = len(first) + len(second) - k
    if overlap <= 0:
        changed = shorter
    else:
        changed = []
        for (weight, count, items), (other_weight, other_count, other_items) in zip(
            first[:overlap], reversed(second[:overlap]), strict=True
        ):
            items += other_items
            changed.append((weight + other_weight, count + other_count, items))
        changed += shorter[overlap:]
        del longer[:overlap]
    if len(changed) * _FEW < len(longer):
        for subset in changed:
            insort(longer, subset)
    else:
        longer += changed
        longer.sort()
    return longer


def split_bin(items: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Split a bin into halves of nearly equal length: longest first, each to the shorter half, ties to the first."""
    halves: tuple[list[int], list[int]] = ([], [])
    totals = [0, 0]
    for item in sorted(items, key=lambda index: -lengths[index]):
        lighter = 0 if totals[0] <= totals[1] else 1
        halves[lighter].append(item)
        totals[lighter] += lengths[item]
    return halves


def split_until(bins: list[list[int]], lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Split the heaviest of ``bins`` until there are ``num_bins``.

    The first half of a split bin keeps its place; the second half is appended at the end.

    Raises:
        DataError: there are fewer items than ``num_bins``.
    """
    bins = list(bins)
    splittable = [
        (-sum(lengths[item] for item in items), -position) for position, items in enumerate(bins) if len(items) > 1
    ]
    heapq.heapify(splittable)
    while len(bins) < num_bins:
        if not splittable:
            raise DataError(
                f"{sum(map(len, bins))} samples cannot be spread over {num_bins} micro-batches; there must be at "
                "least one sample in each; raise --global-batch-size or lower the number of data-parallel ranks"
            )
        position = -heapq.heappop(splittable)[1]
        bins[position], second = split_bin(bins[position], lengths)
        bins.append(second)
        for half in (position, len(bins) - 1):
            if len(bins[half]) > 1:
                heapq.heappush(splittable, (-sum(lengths[item] for item in bins[half]), -half))
    return bins
