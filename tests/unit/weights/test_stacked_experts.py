"""Experts stacked in one tensor, and their individual names."""

import pytest
import torch

from slime.utils.errors import DataError
from slime.weights.stacked_experts import (
    ExpertStacker,
    Stack,
    by_expert,
    find_stacks,
    join_rows,
    place_of,
    row_of,
)

GATE_UP, DOWN = "m.mlp.experts.gate_up_proj", "m.mlp.experts.down_proj"
# Two experts of width 2 over hidden size 3: gate 0, up 10, down 100, and 1000 for the second expert.
STACKS = {
    GATE_UP: torch.tensor([[[0.0] * 3] * 2 + [[10.0] * 3] * 2, [[1000.0] * 3] * 2 + [[1010.0] * 3] * 2]),
    DOWN: torch.tensor([[[100.0] * 2] * 3, [[1100.0] * 2] * 3]),
    "m.norm.weight": torch.ones(3),
}


def test_a_stack_is_the_gates_and_ups_of_its_experts():
    parts = dict(by_expert(STACKS))
    values = {name: float(tensor.mean()) for name, tensor in parts.items()}
    assert values == {
        "m.mlp.experts.0.gate_proj.weight": 0.0,
        "m.mlp.experts.0.up_proj.weight": 10.0,
        "m.mlp.experts.1.gate_proj.weight": 1000.0,
        "m.mlp.experts.1.up_proj.weight": 1010.0,
        "m.mlp.experts.0.down_proj.weight": 100.0,
        "m.mlp.experts.1.down_proj.weight": 1100.0,
        "m.norm.weight": 1.0,
    }
    assert all(tensor.shape == (2, 3) for name, tensor in parts.items() if "gate" in name or "up_proj" in name)
    for name, tensor in parts.items():
        place = place_of(name)
        if place is not None:
            assert torch.equal(place.cut(STACKS[place.stack][place.expert]), tensor)


def test_stacks_come_back_in_whatever_order_the_experts_come():
    sizes = find_stacks({name: tensor.shape for name, tensor in STACKS.items()})
    assert sizes == {GATE_UP: Stack(2), DOWN: Stack(2)}
    parts = list(by_expert(STACKS))
    stacker = ExpertStacker(sizes)
    again = dict(stacker.stack(reversed(parts)))
    stacker.finish()
    assert again.keys() == STACKS.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in STACKS.items())


@pytest.mark.parametrize(("width", "hidden"), [(2, 3), (3, 6), (4, 4)], ids=["apart", "2 I = h", "I = h"])
def test_transposed_stacks_are_known_by_both_shapes_and_hold_the_same_experts(width, hidden):
    stacks = {
        GATE_UP: torch.randn(2, 2 * width, hidden),
        DOWN: torch.randn(2, hidden, width),
        "m.norm.weight": torch.ones(3),
    }
    transposed = {
        name: tensor.mT.contiguous() if name != "m.norm.weight" else tensor for name, tensor in stacks.items()
    }
    found = find_stacks({name: tensor.shape for name, tensor in transposed.items()})
    assert found == {GATE_UP: Stack(2, True), DOWN: Stack(2, True)}
    parts, expected = dict(by_expert(transposed)), dict(by_expert(stacks))
    assert parts.keys() == expected.keys()
    assert all(torch.equal(parts[name], tensor) for name, tensor in expected.items())
    again = dict(ExpertStacker(found).stack(parts.items()))
    assert all(torch.equal(again[name], tensor) for name, tensor in transposed.items())


def test_a_missing_expert_is_an_error_and_other_folders_keep_their_names():
    parts = list(by_expert(STACKS))
    stacker = ExpertStacker({GATE_UP: Stack(2), DOWN: Stack(2)})
    assert DOWN in dict(stacker.stack(parts[1:]))
    with pytest.raises(DataError, match="made of 2 experts"):
        stacker.finish()
    assert dict(ExpertStacker({}).stack(parts)).keys() == dict(parts).keys()


def test_rows_of_experts_are_joined_when_the_last_has_come_in_any_order():
    whole = torch.arange(24.0).view(3, 2, 4)
    rows = [(f"m.experts.gate_up_proj[{index}]", whole[index]) for index in (2, 0, 1)]
    assert row_of(rows[0][0]) == ("m.experts.gate_up_proj", 2) and row_of("m.experts.gate_up_proj") is None
    between = ("m.norm.weight", torch.ones(2))
    (first, norm), (second, joined) = join_rows([rows[0], between, *rows[1:]], 3)
    assert (first, second) == ("m.norm.weight", "m.experts.gate_up_proj")
    assert norm is between[1] and torch.equal(joined, whole)
    ((_, shape),) = join_rows([(name, row.to("meta")) for name, row in rows], 3)
    assert shape.is_meta and shape.shape == whole.shape
    with pytest.raises(DataError, match="number 0 did not come"):
        list(join_rows([rows[0], rows[2]], 3))


def test_a_stack_with_biases_beside_it_has_no_experts_with_names():
    shapes = {DOWN: (2, 3, 2), f"{DOWN}_bias": (2, 3)}
    assert find_stacks(shapes) == {} and find_stacks({DOWN: (2, 3, 2)}) == {DOWN: Stack(2)}
