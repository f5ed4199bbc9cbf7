"""The parts of shard_buckets that need no ranks; see tests/dist/test_shard_buckets.py for the rest."""

from __future__ import annotations

from slime.backends.megatron_utils.update_weight.sources.shard_buckets import (
    describe_misfits,
    quantized_blocks,
    share_of,
)
from slime.weights.quantize import Quantizer
from slime.weights.quantize.formats import BlockFp8, ChannelFp8


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


def test_only_blocks_are_quantized_by_the_ranks_themselves() -> None:
    assert quantized_blocks(None) is None
    blocks = quantized_blocks(Quantizer(BlockFp8((128, 128), ue8m0=True), ["w.weight"]))
    assert blocks is not None
    assert (blocks.block, blocks.kind) == ((128, 128), "fp8_block_ue8m0")
    rows = quantized_blocks(Quantizer(ChannelFp8(), ["w.weight"]))
    assert rows is not None
    assert rows.block is None
    assert rows.is_quantized("w.weight")
