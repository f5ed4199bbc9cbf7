"""The parts of shard_buckets that need no ranks; see tests/ext/fast_push/dist/test_shard_buckets.py for the rest."""

from __future__ import annotations

from slime.ext.fast_push.shard_buckets import describe_misfits, share_of


def test_parameters_that_are_gathered_are_named_once_for_all_layers() -> None:
    reason = "a rank holds [96, 64] of model.layers.{}.mlp.up_proj.weight"
    misfits = {f"decoder.layers.{i}.mlp.linear_fc1.weight": reason.format(i) for i in range(3)}
    misfits["output_layer.weight"] = "its export does more than move rows and columns"
    assert describe_misfits(misfits) == [
        "decoder.layers.0.mlp.linear_fc1.weight and 2 like it: gathered for every push, because " + reason.format(0),
        "output_layer.weight: gathered for every push, because its export does more than move rows and columns",
    ]


def test_ranks_whose_buckets_are_joined_share_one_buckets_size() -> None:
    assert share_of(4096, 4) == 1024
    assert share_of(4096, 3) == 1280, "a whole number of places for slices"
    assert share_of(512, 4) == 256, "room for one piece at least"
    assert share_of(100, 4) == 100
