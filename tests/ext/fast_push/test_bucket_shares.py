"""What each rank of an engine reads of a bucket, and what all of them assemble."""

from __future__ import annotations

import numpy as np
import torch

from slime.ext.fast_push.bucket_shares import JOIN_BYTES, BucketShare, EngineShares, deal
from slime.weights.digest import combine, digest_bytes
from tests.loaded_model.buckets import whole_buckets

SIZES = (8, 16, 24, 32, 40)
MANIFEST = whole_buckets({f"t{index}": torch.zeros(size, dtype=torch.uint8) for index, size in enumerate(SIZES)})
TAKEN = [[bytes([1, 0, 0, 0, 1])], [bytes([0, 1, 0, 0, 1])]]
"""Both ranks read the last tensor, none the third and fourth."""
FLAT = torch.arange(MANIFEST.buckets[0].num_bytes, dtype=torch.int64).to(torch.uint8)


def told(rank: int, flat: torch.Tensor = FLAT) -> dict[int, bytes]:
    positions = deal(TAKEN)[rank][0]
    share = BucketShare(positions, MANIFEST.segments(0), torch.device("cpu"))
    return {0: share.digest(flat).numpy().tobytes()}


def merged(*digests: dict[int, bytes]) -> tuple[list[str], list[str]]:
    shares = EngineShares(MANIFEST)
    shares.deal(TAKEN)
    return shares.merge(digests)


def test_the_digest_of_a_bucket_is_that_of_all_its_slices_whoever_read_them() -> None:
    expected = combine(digest_bytes(FLAT[begin : begin + size]) for begin, size in MANIFEST.segments(0))
    assert merged(told(0), told(1)) == ([f"{expected:016x}"], [])


def test_a_bucket_that_misses_one_rank_has_no_digest() -> None:
    assert merged(told(0), {}) == ([""], [])


def test_ranks_that_received_other_bytes_of_what_both_hold_are_told() -> None:
    other = FLAT.clone()
    other[MANIFEST.buckets[0].slices[4].offset] ^= 1
    texts, problems = merged(told(0), told(1, other))
    assert problems == ["rank 1 received different bytes of t4 than earlier ranks"]


def test_slices_far_apart_are_copied_apart() -> None:
    segments = [(0, 100), (256, 100), (JOIN_BYTES + 512, 8), (1 << 30, 8)]
    share = BucketShare(np.array([0, 1, 2, 3]), segments, torch.device("cpu"))
    assert share.ranges == [(0, 356), (JOIN_BYTES + 512, JOIN_BYTES + 520), (1 << 30, (1 << 30) + 8)]


def test_shares_stay_until_a_rank_takes_something_else() -> None:
    shares = EngineShares(MANIFEST)
    shares.begin()
    shares.deal(TAKEN)
    shares.deal([None, [bytes([0, 1, 1, 1, 0])]])
    assert [shares.positions(rank, 0).tolist() for rank in (0, 1)] == [[0, 4], [1, 2, 3]]
