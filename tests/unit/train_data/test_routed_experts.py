"""Routing of samples: refusals, the rows that a sample needs, and each row's place in the packed stream."""

from __future__ import annotations

import pytest
import torch

from slime.train_data.context_parallel import CPRank, slice_zigzag
from slime.train_data.microbatch import PackingConfig
from slime.train_data.routed_experts import (
    EXPERT_ID_DTYPE,
    RoutedShape,
    check_choices,
    pack_routed_experts,
    routed_rows,
    rows_needed,
    spread_experts,
)
from slime.utils.errors import DataError

SHAPE = RoutedShape(num_layers=3, top_k=2, num_experts=6)
MOE_LAYERS = (0, 2)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    """[count, 3, 2] int32: different experts in every row; zeros in the dense layer, as engines send."""
    generator = torch.Generator().manual_seed(seed)
    result = torch.rand(count, 3, 6, generator=generator).topk(2).indices.int()
    result[:, 1] = 0
    return result


def checked(value: object, total_length: int, num_needed: int = 0) -> torch.Tensor:
    result = routed_rows(value, "sample 7", SHAPE, total_length=total_length, num_needed=num_needed)
    check_choices(result, "sample 7", SHAPE, MOE_LAYERS)
    return result


@pytest.mark.parametrize(("mask", "needed"), [([1, 1, 1], 9), ([1, 0, 0], 7), ([0, 1, 0], 8), ([0, 0, 0], 0), ([], 0)])
def test_a_row_is_needed_for_each_token_before_the_last_trained_one(mask: list[int], needed: int) -> None:
    assert rows_needed(mask, 10) == needed


def test_complete_routing_is_taken_and_kept_in_half_the_bytes() -> None:
    result = checked(rows(9), 10, 9)
    assert result.dtype == EXPERT_ID_DTYPE and torch.equal(result.int(), rows(9))


def test_rows_may_end_behind_the_last_trained_token_and_be_absent_without_one() -> None:
    assert len(checked(rows(7), 10, 7)) == 7
    assert checked(None, 10).shape == (0, 3, 2)


def test_what_an_array_library_brings_is_taken_too() -> None:
    assert torch.equal(checked(rows(4).numpy(), 5).int(), rows(4))


def dead(value: int, layer: int = 2) -> torch.Tensor:
    result = rows(9)
    result[4, layer] = value
    return result


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"sample 7 has 0 rows of rollout_routed_experts for 10 tokens, of which .* depend on 9; --use-rollout"),
        (rows(8), r"sample 7 has 8 rows .* --use-rollout-routing-replay needs a row for each token but the last"),
        (rows(10), r"sample 7 has 10 rows of rollout_routed_experts for 10 tokens"),
        (rows(9)[:, :2], r"sample 7 has shape \[9, 2, 2\]; --use-rollout-routing-replay needs \[tokens - 1, 3 layers"),
        (rows(9)[..., :1], r"has shape \[9, 3, 1\]; .* 2 experts of a token\], as --num-layers and --moe-router-topk"),
        (dead(-1), r"sample 7 has expert -1 at position 4 .* ids from 0 to 5, as --num-experts says"),
        (dead(6), r"sample 7 has expert 6 at position 4"),
        (dead(70000), r"sample 7 has expert 70000 at position 4"),
        (dead(0), r"sample 7 names an expert twice at position 4, layer 2: \[0, 0\]; .* Zeros mean that the engine"),
    ],
    ids=["missing", "short", "long", "layers", "top-k", "minus one", "too large", "not int16", "zeros"],
)
def test_routing_that_cannot_be_replayed_names_the_sample_and_the_flag(value: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        checked(value, 10, 9)


def test_dense_layers_may_hold_anything() -> None:
    checked(dead(0, layer=1), 10, 9)


def test_more_experts_than_ids_can_name_are_refused() -> None:
    with pytest.raises(DataError, match="--num-experts is 40000; expert ids are kept in torch.int16"):
        RoutedShape(num_layers=1, top_k=1, num_experts=40000)


def test_padding_takes_different_experts_and_loads_all_alike() -> None:
    spread = spread_experts(torch.arange(9), SHAPE)
    assert all(len(set(row)) == 2 for row in spread.tolist())
    assert spread.flatten().bincount(minlength=6).tolist() == [3] * 6


LENGTHS = (7, 2, 12)


def samples() -> list[torch.Tensor]:
    return [checked(rows(length - 1, seed), length, length - 1) for seed, length in enumerate(LENGTHS)]


def expected_stream(pieces: list[torch.Tensor], total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [2, total, 2] of the layers with experts, and which slots have routing."""
    known = torch.cat(pieces)
    known = torch.cat([known, torch.full((total - len(known), 3, 2), -9, dtype=known.dtype)])
    return known[:, list(MOE_LAYERS)].transpose(0, 1), known[:, 0, 0] != -9


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("layout", ["zigzag", "allgather"])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_every_token_finds_its_routing_wherever_packing_puts_it(cp_size: int, layout: str, tp_size: int) -> None:
    missing = torch.full((1, 3, 2), -9, dtype=EXPERT_ID_DTYPE)
    whole = [torch.cat([sample, missing]) for sample in samples()]
    for cp_rank in range(cp_size):
        packing = PackingConfig(CPRank(cp_rank, cp_size), pad_multiple=8, layout=layout)
        if layout == "zigzag":
            pieces = [slice_zigzag(sample, packing.cp, pad_value=-9) for sample in whole]
            total = -(-sum(map(len, pieces)) // 8) * 8
            expected, is_known = expected_stream(pieces, total)
        else:
            total = -(-sum(LENGTHS) // (8 * cp_size)) * 8
            expected, is_known = expected_stream(whole, total * cp_size)
            expected, is_known = expected.chunk(cp_size, dim=1)[cp_rank], is_known.chunk(cp_size)[cp_rank]
        parts = [
            pack_routed_experts(
                samples(), LENGTHS, SHAPE, packing, layers=MOE_LAYERS, tp_rank=tp_rank, tp_size=tp_size
            )
            for tp_rank in range(tp_size)
        ]
        packed = torch.cat(parts, dim=1)
        assert packed.shape == (2, total, 2)
        assert torch.equal(packed[:, is_known], expected[:, is_known])
        assert (packed[..., 0] != packed[..., 1]).all()
