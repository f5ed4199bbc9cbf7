"""The digest of the weights that the record has of every rollout: any bit counts, wherever it is."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron_utils.parameters import _column_sums


@pytest.mark.parametrize("size", [1, 3, 7, 250, 4096, 256 * 251 * 4 + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_and_every_place_counts(size, dtype):
    generator = torch.Generator().manual_seed(size)
    weight = torch.randn(size, generator=generator).to(dtype)
    sums = _column_sums(weight)
    assert torch.equal(_column_sums(weight.clone()), sums)
    for place in {0, size // 2, size - 1}:
        changed = weight.clone()
        changed.view(torch.uint8)[place * weight.element_size()] ^= 1
        assert not torch.equal(_column_sums(changed), sums)
    if size > 1:
        swapped = weight.clone()
        swapped[0], swapped[-1] = weight[-1], weight[0]
        assert not torch.equal(_column_sums(swapped), sums)


def test_words_that_change_places_within_a_column_are_seen():
    words = torch.arange(1, 256 * 251 * 2 + 1)
    for step in (256, 251):
        moved = words.clone()
        moved[0], moved[step] = words[step], words[0]
        assert not torch.equal(_column_sums(moved), _column_sums(words))


def test_a_view_that_does_not_begin_at_a_word_is_read_as_its_copy():
    weight = torch.randn(100).bfloat16()
    assert torch.equal(_column_sums(weight[1:]), _column_sums(weight[1:].clone()))
