"""Who sends what: every element once, equal shares, buckets within the limit."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from slime.ext.fast_push import shard_plan
from slime.ext.fast_push.shard_plan import (
    ShardPlan,
    SliceHeader,
    plan_shards,
)
from slime.utils.errors import WeightSyncError
from slime.weights.quantize import Quantizer
from slime.weights.quantize.formats import BlockFp8
from slime.weights.tensor_slice import TensorSlice

BF16 = torch.bfloat16


def whole(name: str, *shape: int, unit: int = 1) -> SliceHeader:
    return SliceHeader(name, shape, BF16, TensorSlice.whole(shape), unit)


def rows(name: str, begin: int, end: int, total: int, columns: int) -> SliceHeader:
    return SliceHeader(name, (total, columns), BF16, TensorSlice((begin, 0), (end - begin, columns)))


def times_sent(plan: ShardPlan) -> dict[str, Counter[int]]:
    """How many elements of each tensor are sent how often."""
    counts = {t.name: torch.zeros(t.shape, dtype=torch.int32) for t in plan.manifest.tensors}
    for bucket in plan.manifest.buckets:
        for piece in bucket.slices:
            counts[piece.name][piece.slice.index] += 1
    return {name: Counter(count.flatten().tolist()) for name, count in counts.items()}


def bytes_of(plan: ShardPlan) -> list[int]:
    return [sum(bucket.num_bytes for bucket in owned) for owned in plan.buckets]


def test_replicas_share_their_tensors_evenly_and_send_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_plan, "MIN_SLICE_BYTES", 1024)
    offers = [whole("large", 256, 256), *(whole(f"w{i}", 16, 256) for i in range(9)), whole("norm", 256)]
    plan = plan_shards([offers] * 4, bucket_bytes=1 << 20)
    sent = bytes_of(plan)
    assert max(sent) - min(sent) <= 8192, sent
    assert all(set(counter) == {1} for counter in times_sent(plan).values())


def test_no_bucket_is_larger_than_allowed_and_a_large_tensor_is_cut() -> None:
    plan = plan_shards([[whole("embedding", 100, 64), whole("norm", 64)]], bucket_bytes=4096)
    assert len(plan.buckets[0]) == 4
    assert all(bucket.num_bytes <= 4096 for bucket in plan.buckets[0])
    assert times_sent(plan) == {"embedding": Counter({1: 6400}), "norm": Counter({1: 64})}


def test_cuts_leave_runs_whole() -> None:
    plan = plan_shards([[whole("q", 96, 64, unit=12)]], bucket_bytes=4096)
    parts = [part for bucket in plan.buckets[0] for part in bucket.slices]
    assert [(part.begin, part.end) for part in parts] == [(0, 24), (24, 48), (48, 72), (72, 96)]


def test_a_matrix_and_its_scales_share_a_bucket() -> None:
    quantizer = Quantizer(BlockFp8((16, 16)), ["w.weight"])
    plan = plan_shards([[whole("w.weight", 72, 40), whole("norm", 40)]], bucket_bytes=2048, quantizer=quantizer)
    assert [(t.name, t.shape, t.dtype) for t in plan.manifest.tensors] == [
        ("w.weight", (72, 40), "float8_e4m3fn"),
        ("w.weight_scale_inv", (5, 3), "float32"),
        ("norm", (40,), "bfloat16"),
    ]
    for bucket in plan.manifest.buckets:
        for piece in bucket.slices:
            if piece.name == "w.weight":
                (scales,) = (other for other in bucket.slices if other.name == "w.weight_scale_inv")
                assert piece.slice.offsets[0] == 16 * scales.slice.offsets[0]
                assert scales.slice.sizes == (math.ceil(piece.slice.sizes[0] / 16), 3)
    assert len(plan.manifest.buckets) > 1
    assert all(set(counter) == {1} for counter in times_sent(plan).values())


def test_buckets_are_numbered_by_group_turn_and_rank() -> None:
    offers = [[whole(f"{rank}{i}", 32, 32) for i in range(3 - rank % 2)] for rank in range(4)]
    plan = plan_shards(offers, bucket_bytes=2048, groups=[[0, 1], [2, 3]])
    assert [[bucket.index for bucket in owned] for owned in plan.buckets] == [[0, 2, 4], [1, 3], [5, 7, 9], [6, 8]]
    assert plan.num_turns([0, 1]) == 3
    assert plan.num_turns([1]) == 2


def test_tensors_that_no_rank_holds_whole_are_an_error() -> None:
    with pytest.raises(WeightSyncError, match="16 elements together"):
        plan_shards([[rows("w", 0, 4, 8, 4)]], bucket_bytes=10_000)


def test_replicas_that_are_cut_differently_are_an_error() -> None:
    with pytest.raises(WeightSyncError, match="ranks 0 and 1 hold different slices of w"):
        plan_shards([[rows("w", 0, 8, 8, 4)], [rows("w", 0, 4, 8, 4)]], bucket_bytes=10_000)
