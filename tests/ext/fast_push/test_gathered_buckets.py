import torch

from slime.ext.fast_push.gathered_buckets import plan_buckets
from slime.ext.fast_push.manifest import Manifest


def test_a_plan_lays_whole_tensors_out_without_passing_the_limit_or_parting_a_unit() -> None:
    units = [
        [("a", (10,), torch.float32)],
        [("b", (2, 3), torch.bfloat16), ("b.scale", (1, 1), torch.float32)],
        [("c", (300,), torch.uint8)],
        [("d", (2000,), torch.uint8)],
        [("e", (1,), torch.uint8)],
    ]
    tensors, buckets = plan_buckets(units, 1024)
    assert [[piece.name for piece in bucket.slices] for bucket in buckets] == [
        ["a", "b", "b.scale"],
        ["c"],
        ["d"],
        ["e"],
    ]
    assert [entry.name for entry in tensors] == ["a", "b", "b.scale", "c", "d", "e"]
    assert [piece.offset for piece in buckets[0].slices] == [0, 256, 512]
    assert [bucket.num_bytes for bucket in buckets] == [516, 300, 2000, 1]
    Manifest(tuple(tensors), tuple(buckets))
