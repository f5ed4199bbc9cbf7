"""The choice of keys: against brute force and transformers, independent of packing and splits of the stream."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slime_plugins.models.glm5 import indexer
from slime_plugins.models.glm5.indexer import PackedStream, choose_keys, index_scores, rotate_last
from slime_plugins.models.shared_weights import turning_part_first, turning_part_last

LENGTHS = (1, 23, 7, 40)
TOPK = 7


def make_case(lengths: tuple[int, ...] = LENGTHS, heads: int = 16) -> tuple[Tensor, Tensor, Tensor, PackedStream]:
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    query = torch.randn(total, heads, 12, generator=generator)
    weight = torch.randn(total, heads, generator=generator)
    key = torch.randn(total, 12, generator=generator)
    return query, weight, key, PackedStream.from_offsets(torch.tensor([0, *lengths]).cumsum(0).int())


def chosen_sets(indices: Tensor) -> list[set[int]]:
    return [{index for index in row if index >= 0} for row in indices.tolist()]


def brute_force(query: Tensor, weight: Tensor, key: Tensor, lengths: tuple[int, ...], topk: int) -> list[set[int]]:
    """Row by row: the best of the sequence's keys up to the row."""
    result, start = [], 0
    for length in lengths:
        for row in range(start, start + length):
            scores = (key[start : row + 1] @ query[row].T).relu() @ weight[row]
            best = scores.topk(min(topk, len(scores))).indices + start
            result.append(set(best.tolist()))
        start += length
    return result


def test_scores_are_weighted_rectified_products() -> None:
    query = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
    key = torch.tensor([[3.0, -1.0], [-1.0, 1.0]])
    # head 0: 3 and -1 (rectified 0); head 1: -2 (rectified 0) and 2
    assert index_scores(query, torch.tensor([[0.5, -1.0]]), key).tolist() == [[1.5, -2.0]]


@pytest.mark.parametrize("block", [1, 1 << 20])
def test_every_row_gets_the_best_keys_of_its_own_sequence(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(indexer._BLOCK_ELEMENTS, "cpu", block)
    query, weight, key, stream = make_case()
    indices = choose_keys(query, weight, key, stream, first_row=0, topk=TOPK)
    assert indices.shape == (sum(LENGTHS), TOPK) and indices.dtype == torch.int32
    assert chosen_sets(indices) == brute_force(query, weight, key, LENGTHS, TOPK)


@pytest.mark.parametrize("parts", [2, 4])
def test_the_parts_of_a_cut_stream_choose_what_the_whole_stream_does(parts: int) -> None:
    lengths = (1, 23, 7, 37)
    query, weight, key, stream = make_case(lengths)
    whole = choose_keys(query, weight, key, stream, first_row=0, topk=TOPK)
    size = sum(lengths) // parts
    cut = [
        choose_keys(query[i : i + size], weight[i : i + size], key, stream, first_row=i, topk=TOPK)
        for i in range(0, sum(lengths), size)
    ]
    assert chosen_sets(torch.cat(cut)) == chosen_sets(whole)


def test_interleaved_pairs_are_the_halves_of_permuted_dimensions() -> None:
    query, weight, key, stream = make_case()
    angles = torch.randn(sum(LENGTHS), 4)
    order = [0, 1, 2, 3, *(4 + 2 * i for i in range(4)), *(5 + 2 * i for i in range(4))]

    def choose(query: Tensor, key: Tensor, *, is_interleaved: bool) -> list[set[int]]:
        turn = {"cosines": angles.cos(), "sines": angles.sin(), "is_interleaved": is_interleaved}
        query, key = rotate_last(query, **turn), rotate_last(key, **turn)
        return chosen_sets(choose_keys(query, weight, key, stream, first_row=0, topk=TOPK))

    interleaved = choose(query, key, is_interleaved=True)
    assert interleaved == choose(query[..., order], key[..., order], is_interleaved=False)
    assert interleaved != choose(query, key, is_interleaved=False)


@pytest.mark.parametrize("sizes", [(128, 64), (20, 8)])
def test_the_turning_rows_move_to_the_back_of_each_head_and_back(sizes: tuple[int, int]) -> None:
    from types import SimpleNamespace

    head, turning = sizes
    shape = SimpleNamespace(index_head_dim=head, rope_dim=turning)
    weight = torch.arange(3 * head * 2).view(3 * head, 2)
    moved = turning_part_last(weight, shape)
    for h in range(3):
        expected = [*range(h * head + turning, (h + 1) * head), *range(h * head, h * head + turning)]
        assert (moved[h * head : (h + 1) * head, 0] // 2).tolist() == expected
    assert torch.equal(turning_part_first(moved, shape), weight)
    assert torch.equal(turning_part_last(weight[:head, 0], shape), moved[:head, 0])


def test_the_choice_is_that_of_transformers_indexer() -> None:
    from types import SimpleNamespace

    from transformers import GlmMoeDsaConfig
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer, GlmMoeDsaRotaryEmbedding

    heads, width, turning, length = 16, 20, 8, 40
    config = GlmMoeDsaConfig(
        hidden_size=24, q_lora_rank=12, qk_rope_head_dim=turning, index_topk=TOPK, index_n_heads=heads,
        index_head_dim=width, rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )  # fmt: skip
    theirs = GlmMoeDsaIndexer(config, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    hidden = torch.randn(1, length, 24, generator=generator)
    latent = torch.randn(1, length, 12, generator=generator)
    positions = torch.arange(length)[None]
    cosines, sines = GlmMoeDsaRotaryEmbedding(config)(hidden, positions)
    expected = theirs(hidden, latent, (cosines, sines), None, positions)[0]
    rows = torch.arange(length)[:, None]
    expected_sets = chosen_sets(expected.masked_fill(expected > rows, -1))

    stream = PackedStream.from_offsets(torch.tensor([0, length]))
    shape = SimpleNamespace(index_head_dim=width, rope_dim=turning)

    def ours(move: bool) -> list[set[int]]:
        def place(weight: Tensor) -> Tensor:
            return turning_part_last(weight, shape) if move else weight

        turn = {"cosines": cosines[0, :, :4], "sines": sines[0, :, :4], "is_interleaved": False}
        query = (latent[0] @ place(theirs.wq_b.weight).T).unflatten(-1, (heads, width))
        norm = theirs.k_norm
        key = torch.nn.functional.layer_norm(
            hidden[0] @ place(theirs.wk.weight).T, (width,), place(norm.weight), place(norm.bias), 1e-6
        )
        weight = hidden[0] @ theirs.weights_proj.weight.T * (heads * width) ** -0.5
        return chosen_sets(
            choose_keys(rotate_last(query, **turn), weight, rotate_last(key, **turn), stream, first_row=0, topk=TOPK)
        )

    assert ours(move=True) == expected_sets
    assert ours(move=False) != expected_sets, "the test cannot tell which dimensions turn"
