"""The manifest of a push: what it refuses, and its text form."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from slime.ext.fast_push.manifest import ALIGNMENT, BucketEntry, BucketSlice, Manifest, TensorEntry, pack_whole
from slime.utils.errors import WeightSyncError
from slime.weights.tensor_slice import TensorSlice


def two_halves(second_start: int = 2) -> Manifest:
    tensor = TensorEntry("w", (4, 3), "float32")
    pieces = (
        BucketSlice("w", 0, TensorSlice((0, 0), (2, 3))),
        BucketSlice("w", ALIGNMENT, TensorSlice((second_start, 0), (2, 3))),
    )
    return Manifest((tensor,), (BucketEntry(ALIGNMENT + 24, pieces),))


def test_text_form_is_read_back_and_names_the_layout():
    manifest = two_halves()
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    assert again.id == manifest.id


def test_tensors_that_are_alike_share_their_shapes_and_slices_in_the_text_form():
    named = [(f"layers.{number}.w", (4, 3), torch.bfloat16) for number in range(9)]
    entries, bucket = pack_whole([*named, ("norm", (3,), torch.float32)])
    manifest = Manifest(tuple(entries), (bucket,))
    content = json.loads(manifest.to_json())
    assert content["kinds"] == [[[4, 3], "bfloat16"], [[3], "float32"]]
    assert content["slices"] == [[[0, 0], [4, 3]], [[0], [3]]]
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_constant_buckets_are_named_in_the_text_form():
    plain = two_halves()
    manifest = dataclasses.replace(plain, buckets=(dataclasses.replace(plain.buckets[0], is_constant=True),))
    assert Manifest.from_json(manifest.to_json()) == manifest and manifest.constants == (0,)
    assert manifest.id != plain.id and plain.constants == ()


def test_whole_tensors_lie_behind_each_other_at_aligned_offsets():
    entries, bucket = pack_whole(iter([("a", (3,), torch.bfloat16), ("b", (2, 2), torch.float32)]))
    assert [entry.dtype for entry in entries] == ["bfloat16", "float32"]
    assert [piece.offset for piece in bucket.slices] == [0, ALIGNMENT]
    assert bucket.num_bytes == ALIGNMENT + 16
    Manifest(tuple(entries), (bucket,))


def test_a_piece_outside_of_its_tensor_is_refused():
    with pytest.raises(WeightSyncError, match=r"w has the shape \[4, 3\]"):
        two_halves(second_start=3)


def test_pieces_that_do_not_make_up_the_tensor_are_refused():
    tensor = TensorEntry("w", (4, 3), "float32")
    with pytest.raises(WeightSyncError, match="6 elements together"):
        Manifest((tensor,), (BucketEntry(24, (BucketSlice("w", 0, TensorSlice((0, 0), (2, 3))),)),))
