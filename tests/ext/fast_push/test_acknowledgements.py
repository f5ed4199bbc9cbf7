"""Comparing what an engine says it holds with what was sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slime.ext.fast_push.acknowledgements import DigestedBuckets, check_acknowledgements
from slime.ext.fast_push.carrier import NO_BUCKET
from slime.ext.fast_push.manifest import Manifest, pack_whole
from slime.utils.errors import WeightSyncError
from slime.weights.digest import combine, digest_bytes

FIRST, BUCKET_0 = pack_whole([("a", (3,), torch.float32), ("b", (2, 2), torch.bfloat16)])
SECOND, BUCKET_1 = pack_whole([("c", (5,), torch.uint8)])
MANIFEST = Manifest((*FIRST, *SECOND), (BUCKET_0, BUCKET_1))
SENT = {0: 0xABC, 1: 2**64 - 1}
GOOD = ["0000000000000abc", "ffffffffffffffff"]


def answer(push_id: str = "p", buckets: list[str] | None = None, problems: list[str] | None = None) -> dict[str, Any]:
    return {"push_id": push_id, "buckets": GOOD if buckets is None else buckets, "problems": problems or []}


class OneBucket:
    """A source of bucket 0, followed by an empty step."""

    manifest = MANIFEST

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat

    def iter_buckets(self, *, with_constants: bool = True) -> Iterator[tuple[int, torch.Tensor]]:
        yield 0, self.flat
        yield NO_BUCKET, self.flat[:0]


def walk(buckets: DigestedBuckets) -> dict[int, int]:
    assert [index for index, _ in buckets.iter_buckets()] == [0, NO_BUCKET]
    return buckets.digests()


def test_the_digest_of_a_bucket_is_that_of_its_pieces_and_not_of_what_lies_between() -> None:
    flat = torch.arange(BUCKET_0.num_bytes, dtype=torch.int64).to(torch.uint8)
    buckets = DigestedBuckets(OneBucket(flat))
    expected = combine([digest_bytes(flat[:12]), digest_bytes(flat[256:264])])
    assert walk(buckets) == {0: expected}
    assert buckets.digests() == {}
    flat[100] += 1
    assert walk(buckets) == {0: expected}
    flat[257] += 1
    assert walk(buckets) != {0: expected}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (answer(), None),
        (answer("q"), "it acknowledged the push 'q' instead of 'p'"),
        (answer(problems=["x was never written", "y neither"]), "x was never written (and 1 more problems)"),
        (answer(buckets=GOOD[:1]), "it acknowledged 1 buckets of 2"),
        (answer(buckets=[GOOD[0], ""]), "it holds nothing for bucket 1 (c, ...)"),
        (answer(buckets=["0" * 16, GOOD[1]]), "it holds the digest 0000000000000000 for bucket 0 (a, b, ...)"),
    ],
)
def test_an_engine_that_holds_anything_else_is_named_with_the_difference(given: dict[str, Any], reason: Any) -> None:
    reasons = check_acknowledgements({4: given}, "p", SENT, MANIFEST)
    assert list(reasons) == ([] if reason is None else [4])
    assert reason is None or reasons[4].startswith(reason)


def test_a_bucket_that_no_rank_sent_is_the_trainers_error() -> None:
    with pytest.raises(WeightSyncError, match="no trainer rank sent bucket 1 of 2"):
        check_acknowledgements({}, "p", {0: 1}, MANIFEST)
