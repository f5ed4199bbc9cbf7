"""Tensors that come in pieces, and tensors that wait for each other."""

from __future__ import annotations

import torch

from slime.backends.sglang_utils.held_tensors import HeldTensors
from slime.weights.tensor_slice import TensorSlice
from tests.loaded_model.buckets import cut_buckets, fill, manifest_of, whole_buckets

TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(8.0).view(2, 4) + 100, "c": torch.tensor(7.0)}
PAIR = {"a": frozenset(("a", "b")), "b": frozenset(("a", "b"))}


def feed(manifest, groups=None, names=TENSORS, **settings):
    """(held, what each bucket completed); a bucket's buffer is overwritten before the next comes."""
    held = HeldTensors(manifest, groups or {}, **settings)
    results = []
    for bucket, flat in zip(manifest.buckets, fill(manifest, TENSORS), strict=True):
        complete = held.add(bucket, flat, names)
        results.append(
            (
                [name for name, _ in complete.direct],
                {name: tensor.clone() for name, tensor in complete.assembled},
                complete.refused,
            )
        )
        flat.fill_(255)
    return held, results


def test_whole_tensors_are_given_at_once():
    held, results = feed(whole_buckets(TENSORS))
    assert results == [(["a", "b", "c"], {}, set())]
    assert held.incomplete == []


def test_pieces_become_a_tensor_with_the_last_of_them():
    held, ((direct, _, _), (_, assembled, _)) = feed(cut_buckets(TENSORS, 2))
    assert direct == ["c"]
    assert torch.equal(assembled["a"], TENSORS["a"]) and torch.equal(assembled["b"], TENSORS["b"])
    assert held.incomplete == []


def test_partners_wait_for_each_other():
    _, results = feed(whole_buckets(TENSORS, 3), PAIR)
    assert [direct for direct, _, _ in results] == [[], [], ["c"]]
    assert torch.equal(results[1][1]["a"], TENSORS["a"]) and torch.equal(results[1][1]["b"], TENSORS["b"])
    _, results = feed(whole_buckets(TENSORS), PAIR)
    assert results[0][0] == ["a", "b", "c"], "in one bucket they need not wait"


def test_what_did_not_come_is_named():
    manifest = manifest_of(
        TENSORS,
        [
            [("a", TensorSlice((0, 0), (3, 2))), ("b", TensorSlice((0, 0), (2, 4))), ("c", TensorSlice((), ()))],
            [("a", TensorSlice((0, 2), (3, 2)))],
        ],
    )
    held = HeldTensors(manifest, PAIR)
    held.add(manifest.buckets[0], fill(manifest, TENSORS)[0], TENSORS)
    assert held.incomplete == ["a", "b"]


def test_other_tensors_are_passed_over():
    held, results = feed(cut_buckets(TENSORS, 2), names={"b"})
    assert [list(assembled) for _, assembled, _ in results] == [[], ["b"]]


def test_what_exceeds_the_limit_is_refused_in_every_bucket():
    held, results = feed(cut_buckets(TENSORS, 2), limit_bytes=40)
    assert [refused for _, _, refused in results] == [{"a"}, {"a"}], "48 bytes"
    assert list(results[1][1]) == ["b"], "32 bytes"
    assert held.incomplete == []


def test_a_group_is_refused_as_a_whole():
    _, results = feed(cut_buckets(TENSORS, 2), PAIR, limit_bytes=60)
    assert [refused for _, _, refused in results] == [{"a", "b"}, {"a", "b"}], "48 + 32 bytes"


def test_memory_is_free_again_when_a_tensor_is_complete():
    halves = [
        [("a", TensorSlice((0, 0), (3, 2)))],
        [("a", TensorSlice((0, 2), (3, 2)))],
        [("b", TensorSlice((0, 0), (1, 4)))],
        [("b", TensorSlice((1, 0), (1, 4)))],
    ]
    tensors = {name: TENSORS[name] for name in "ab"}
    held = HeldTensors(manifest_of(tensors, halves), {}, limit_bytes=48)
    manifest = manifest_of(tensors, halves)
    for bucket, flat in zip(manifest.buckets, fill(manifest, tensors), strict=True):
        assert held.add(bucket, flat, tensors).refused == set()
