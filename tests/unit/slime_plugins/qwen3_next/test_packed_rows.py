"""Positions of tokens in chunks, in the convolution's input, and on context-parallel ranks: indices by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slime.backends.megatron_utils.layers.rotary import zigzag_places
from slime_plugins.models.qwen3_next.packed_rows import PackedRows, rows_or_zeros


def test_first_chunks_come_first_and_the_longest_sequence_before_the_others():
    rows = PackedRows.from_offsets([0, 2, 2, 7], conv_width=3, chunk=2)
    # sequences 0..1 and 2..6; 7 means no token
    assert rows.chunk_tokens.tolist() == [[2, 3], [0, 1], [4, 5], [6, 7]]
    assert rows.chunks_of_step == (2, 1, 1)
    assert rows.chunk_places.tolist() == [2, 3, 0, 1, 4, 5, 6]
    assert rows.cu_seqlens.tolist() == [0, 2, 7]
    assert rows.conv_tokens.tolist() == [7, 7, 0, 1, 7, 7, 2, 3, 4, 5, 6]
    assert rows.conv_places.tolist() == [0, 1, 4, 5, 6, 7, 8]


def test_every_token_has_one_place_in_the_chunks():
    rows = PackedRows.from_offsets([0, 5, 6, 19, 20], conv_width=4, chunk=3)
    assert torch.equal(rows.chunk_tokens.flatten()[rows.chunk_places], torch.arange(20))
    assert len(rows.chunk_tokens) == sum(rows.chunks_of_step) == 2 + 1 + 5 + 1


def test_a_packed_convolution_is_that_of_each_sequence_alone():
    x, weight = torch.randn(9, 2), torch.randn(2, 1, 4)
    rows = PackedRows.from_offsets([0, 1, 7, 9], conv_width=4)
    padded = rows_or_zeros(x, rows.conv_tokens).T[None]
    packed = F.conv1d(padded, weight, groups=2)[0].T[rows.conv_places]
    alone = [F.conv1d(F.pad(part.T[None], (3, 0)), weight, groups=2)[0].T for part in x.split([1, 6, 2])]
    torch.testing.assert_close(packed, torch.cat(alone))


def test_zigzag_parts_are_put_in_order():
    # sequences of 4 and 8 tokens over two ranks, each of which holds chunks r and 3 - r
    first, second = [0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]
    places = zigzag_places([0, 4, 12], 2)
    assert torch.tensor(first + second)[places].tolist() == list(range(12))
