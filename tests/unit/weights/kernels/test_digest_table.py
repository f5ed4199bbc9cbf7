"""Digests of many segments on the CPU: those of each segment alone."""

from __future__ import annotations

import pytest
import torch

from slime.weights.digest import digest_bytes
from slime.weights.kernels.digest_table import DigestTable, as_unsigned, digest_segments

DATA = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_segments_have_the_digests_of_their_bytes():
    offsets, lengths = [0, 256, 1000, 4096], [256, 3, 3096, 0]
    wanted = [digest_bytes(DATA[begin : begin + size]) for begin, size in zip(offsets, lengths)]
    assert digest_segments(DATA, offsets, lengths) == wanted
    assert as_unsigned(DigestTable(offsets, lengths, "cpu").run(DATA)) == wanted
    assert max(wanted) >= 1 << 63, "the case has a value that int64 wraps"


def test_no_segments_have_no_digests():
    assert digest_segments(DATA, [], []) == []


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="2 offsets and 1 lengths"):
        DigestTable([0, 8], [8], "cpu")
    with pytest.raises(ValueError, match="need 4097"):
        digest_segments(DATA, [0], [4097])
