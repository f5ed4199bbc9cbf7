"""Compressed entries of packed sequences: which tokens form them, which queries see them, which are chosen."""

from __future__ import annotations

import torch

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from slime.backends.megatron_utils.layers.rotary import RotaryTables
from slime_plugins.models.deepseek_v4.compression import PackedEntries, choose_entries, turn_last

OFFSETS = torch.tensor([0, 9, 9, 12, 26], dtype=torch.int32)
"""Lengths 9, 0, 3 (too short for an entry) and 14."""


def test_entries_are_made_and_seen_within_a_sequence():
    entries = PackedEntries.from_offsets(OFFSETS, 4)
    assert entries.tokens.tolist() == [[*range(first, first + 4)] for first in (0, 4, 12, 16, 20)]
    assert entries.before.tolist() == [5, 0, 5, 2, 3]
    assert entries.positions.tolist() == [0, 4, 0, 4, 8]
    seen = [[entry for entry in row if entry >= 0] for row in entries.seen(torch.arange(26)).tolist()]
    ends = {0: 3, 1: 7, 2: 15, 3: 19, 4: 23}
    starts = [0] * 9 + [9] * 3 + [12] * 14
    expected = [[e for e, end in ends.items() if starts[token] <= end <= token] for token in range(26)]
    assert seen == expected


def test_sequences_that_are_all_too_short_have_no_entries():
    entries = PackedEntries.from_offsets(torch.tensor([0, 3, 5], dtype=torch.int32), 4)
    assert entries.tokens.shape == (0, 4) and entries.seen(torch.arange(5)).shape == (5, 0)
    angles = torch.zeros(len(entries.tokens), 2)
    assert turn_last(torch.zeros(len(entries.tokens), 6), RotaryTables(angles, angles)).shape == (0, 6)


def test_the_best_of_the_entries_that_a_token_sees_are_chosen():
    entries = PackedEntries.from_offsets(OFFSETS, 2)
    key = torch.randn(13 - 1, 3, generator=torch.Generator().manual_seed(0)).abs()
    places = torch.arange(26)
    query, weight = torch.ones(26, 1, 3), torch.ones(26, 1)
    chosen = choose_entries(query, weight, key, entries, places, places, 2).tolist()
    score = key.sum(dim=1).tolist()
    for token, every in enumerate(entries.seen(places).tolist()):
        visible = [entry for entry in every if entry >= 0]
        best = sorted(visible, key=lambda entry: -score[entry])[:2]
        assert sorted(entry for entry in chosen[token] if entry >= 0) == sorted(best)
