"""What a rank holds of HF tensors: values by hand, and that splitting rows loses nothing."""

from __future__ import annotations

from argparse import Namespace
from itertools import product

import pytest
import torch
from torch import Tensor

from slime.backends.megatron_utils import models
from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf, hf_form
from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.rule import Rule, WeightMap
from slime.ext.fast_push.shard_layout import (
    RowRuns,
    ShardLayout,
    ShardSlice,
    TensorSplit,
)
from slime.weights.tensor_slice import TensorSlice

QKV = "decoder.layers.3.self_attention.linear_qkv"
FC1 = "decoder.layers.3.mlp.linear_fc1.weight"


def make_args(**changes: object) -> Namespace:
    """Eight heads of two in four groups, five of eight rows of the vocabulary."""
    flags = dict(
        num_layers=4,
        num_attention_heads=8,
        num_query_groups=4,
        group_query_attention=True,
        kv_channels=2,
        hidden_size=6,
        vocab_size=5,
        padded_vocab_size=8,
        untie_embeddings_and_output_weights=True,
        num_experts=None,
        mtp_num_layers=None,
        hf_checkpoint=None,
    )
    return Namespace(**{**flags, **changes})


def found(
    name: str, shape: tuple[int, ...], split: TensorSplit, model: str = "qwen3", **flags: object
) -> list[ShardSlice]:
    slices = ShardLayout(hf_form(make_args(**flags), model)).slices(name, shape, split)
    assert slices is not None
    return slices


def numbers(rows: RowRuns) -> list[int]:
    """The row numbers one by one."""
    return [rows.first + (r // rows.run) * rows.stride + r % rows.run for r in range(rows.count)]


def indices(held: ShardSlice) -> list[int]:
    return [index for rows in held.rows for index in numbers(rows)]


def test_the_padding_of_the_vocabulary_belongs_to_no_tensor() -> None:
    first, last = (found("output_layer.weight", (4, 6), TensorSplit(0, rank, 2)) for rank in range(2))
    assert (first[0].slice.offsets, first[0].slice.sizes) == ((0, 0), (4, 6))
    assert (last[0].slice.offsets, last[0].slice.sizes) == ((4, 0), (1, 6))
    assert found("output_layer.weight", (2, 6), TensorSplit(0, 3, 4)) == []


@pytest.mark.parametrize(
    ("name", "part", "split"),
    [
        (f"{QKV}.weight", (16, 6), TensorSplit(0, 1, 2)),
        (FC1, (8, 6), TensorSplit(0, 2, 3, is_gate_up=True)),
        ("decoder.layers.0.mlp.linear_fc2.weight", (6, 4), TensorSplit(1, 1, 3)),
        ("embedding.word_embeddings.weight", (4, 6), TensorSplit(0, 1, 2)),
    ],
)
def test_slices_hold_what_the_export_of_the_whole_gives(name: str, part: tuple[int, ...], split: TensorSplit) -> None:
    size = torch.Size(part).numel()
    parts = [torch.arange(size).view(part) + size * rank for rank in range(split.size)]
    if split.is_gate_up:
        halves = [half for which in range(2) for half in (p.chunk(2, dim=split.dim)[which] for p in parts)]
        whole = torch.cat(halves, dim=split.dim)
    else:
        whole = torch.cat(parts, dim=split.dim)
    exported = dict(convert_to_hf(make_args(), "qwen3", name, whole))
    for held in found(name, part, split):
        place = tuple(slice(s, s + n) for s, n in zip(held.slice.offsets, held.slice.sizes, strict=True))
        columns = slice(held.first_column, held.first_column + held.num_columns)
        assert torch.equal(exported[held.name][place], parts[split.rank][indices(held)][:, columns])


@pytest.fixture
def transposing(monkeypatch: pytest.MonkeyPatch) -> None:
    def split(tensor: Tensor, shape: object) -> tuple[Tensor]:
        return (tensor.T,)

    top = (Rule("output_layer.weight", ("head.weight",), split=split),)
    weight_map = WeightMap("one that transposes", top=top, layer=())
    family = ModelFamily(model_types=("transposing",), weight_map=weight_map)
    monkeypatch.setattr(models, "find_family", lambda name: family)


@pytest.mark.usefixtures("transposing")
def test_an_export_that_moves_more_than_rows_and_columns_has_no_slices() -> None:
    layout = ShardLayout(hf_form(make_args(vocab_size=6, padded_vocab_size=6), "transposing"))
    assert layout.slices("output_layer.weight", (6, 6), TensorSplit()) is None


def test_rows_stay_what_they_are_when_they_are_cut_anywhere() -> None:
    for run, count, stride in product((1, 3, 4), (1, 7, 12), (4, 9)):
        rows = RowRuns(2, count, min(run, count), stride)
        for begin in range(count):
            for end in range(begin + 1, count + 1):
                pieces = [index for piece in rows.between(begin, end) for index in numbers(piece)]
                assert pieces == numbers(rows)[begin:end]


def test_a_slice_is_on_blocks_when_its_edges_and_seams_are() -> None:
    def held(start: tuple[int, int], shape: tuple[int, int], *counts: int) -> ShardSlice:
        rows = tuple(RowRuns(0, count, count, 0) for count in counts or (shape[0],))
        return ShardSlice("w", (10, 12), TensorSlice(start, shape), 0, rows)

    assert held((4, 0), (4, 12)).is_on_blocks((4, 4))
    assert held((8, 8), (2, 4)).is_on_blocks((4, 4)), "the end of the tensor ends its last block"
    assert not held((4, 0), (3, 12)).is_on_blocks((4, 4))
    assert not held((2, 0), (8, 12)).is_on_blocks((4, 4))
    assert not held((0, 6), (4, 6)).is_on_blocks((4, 4))
    assert held((0, 0), (8, 12), 4, 4).is_on_blocks((4, 4))
    assert not held((0, 0), (8, 12), 6, 2).is_on_blocks((4, 4))

    def in_runs(run: int) -> ShardSlice:
        return ShardSlice("w", (24, 12), TensorSlice((0, 0), (24, 12)), 0, (RowRuns(0, 24, run, 2 * run),))

    assert in_runs(8).is_on_blocks((4, 4))
    # Split after row 20, a run of the rest would end 4 rows later; of 6 rows, one ends after row 2 of the rest.
    assert not in_runs(6).is_on_blocks((4, 4))
    assert not ShardSlice("b", (8,), TensorSlice((0,), (8,)), 0, (RowRuns(0, 8, 8, 0),)).is_on_blocks((4, 4))
