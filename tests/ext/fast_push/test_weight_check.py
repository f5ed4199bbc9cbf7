"""The comparison with a model that fuses gate and up like SGLang's: rows 0-2 gate, rows 3-5 up."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from slime.ext.fast_push import loader_report, weight_check
from slime.ext.fast_push.loader_report import CHECK_REPORT
from slime.ext.fast_push.manifest import Manifest, TensorEntry
from slime.ext.fast_push.weight_check import (
    compare_weights,
    differing_names,
    fill_with_nan,
    find_nan,
)


class Fused(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(6, 4, dtype=dtype), requires_grad=False)
        self.norm = nn.Parameter(torch.randn(4, dtype=dtype), requires_grad=False)
        self.experts = nn.Parameter(torch.arange(4), requires_grad=False)

    def load_weights(self, named_tensors):
        for name, tensor in named_tensors:
            if name == "gate":
                self.gate_up.data[:3].copy_(tensor)
            elif name == "up":
                self.gate_up.data[3:].copy_(tensor)
            else:
                self.get_parameter(name).data.copy_(tensor)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(loader_report, "gather_over_ranks", lambda problems: [problems])


def held(model: Fused) -> list[tuple[str, torch.Tensor]]:
    """The model's weights as the trainer would send them: in fp32."""
    full = {"gate": model.gate_up[:3], "up": model.gate_up[3:], "norm": model.norm}
    return [(name, tensor.detach().float().clone()) for name, tensor in full.items()]


def report(model: Fused) -> list[str]:
    return model.get_weights_by_name(CHECK_REPORT, 100, tp_size=1)


@DTYPES
def test_equal_tensors_differ_nowhere(dtype):
    model = Fused(dtype)
    assert differing_names(model, held(model)) == []


@DTYPES
def test_a_changed_element_is_blamed_on_its_tensor_and_the_model_keeps_its_own(dtype):
    model = Fused(dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sent = held(model)
    sent[1][1][2, 1] += 1
    assert differing_names(model, sent) == ["up (shape [3, 4]): 1 elements differ in gate_up"]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_nan_equals_itself_and_minus_zero_is_not_zero():
    model = Fused(torch.float32)
    model.norm.data[0], model.norm.data[1] = float("nan"), 0.0
    assert differing_names(model, [("norm", model.norm.detach().clone())]) == []
    sent = model.norm.detach().clone()
    sent[1] = -0.0
    assert len(differing_names(model, [("norm", sent)])) == 1


def test_a_tensor_that_the_model_cannot_load_is_reported_and_changes_nothing():
    model = Fused(torch.float32)
    before = model.gate_up.detach().clone()
    (problem,) = differing_names(model, [("gate", torch.zeros(5, 5))])
    assert "gate [5, 5]" in problem
    assert torch.equal(model.gate_up, before)


def test_poison_remains_where_nothing_was_pushed():
    model = Fused(torch.bfloat16)
    sent = held(model)
    fill_with_nan(model, [])
    assert model.norm.isnan().all()
    model.load_weights(sent[:1])
    find_nan(model, [])
    assert report(model) == [
        "gate_up: 12 of 24 elements were never pushed",
        "norm: 4 of 4 elements were never pushed",
    ]
    model.load_weights(sent)
    find_nan(model, [])
    assert report(model) == []
    assert model.experts.tolist() == [0, 1, 2, 3]


def test_what_no_push_brings_is_neither_overwritten_nor_looked_for():
    model = Fused(torch.bfloat16)
    sent = held(model)
    norm = next(tensor for name, tensor in sent if name == "norm")
    kept = (TensorEntry("norm", tuple(norm.shape), "bfloat16"),)
    message = [(json.dumps({"manifest": Manifest((), (), kept).to_json()}), torch.empty(0))]
    before = model.norm.clone()
    fill_with_nan(model, message)
    assert torch.equal(model.norm, before)
    find_nan(model, message)
    assert report(model) == ["gate_up: 24 of 24 elements were never pushed"]


def test_scales_that_no_checkpoint_has_are_neither_poisoned_nor_missed() -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.ones(2))
    model.k_scale = torch.nn.Parameter(torch.tensor([0.5]))
    model.w13_input_scale = torch.nn.Parameter(torch.tensor([0.25]))  # of experts
    model.block_scale = torch.nn.Parameter(torch.ones(1))  # a checkpoint's
    weight_check.fill_parameters_with_nan(model)
    assert (model.k_scale.item(), model.w13_input_scale.item()) == (0.5, 0.25)
    assert weight_check.find_nan_in(model) == [
        "weight: 2 of 2 elements were never pushed",
        "block_scale: 1 of 1 elements were never pushed",
    ]


def test_problems_of_a_draft_model_are_told_by_the_target_which_alone_is_asked():
    draft, target = Fused(torch.float32), Fused(torch.float32)
    sent = held(target)
    for model in (draft, target):
        compare_weights(model, sent)
    found = report(target)
    assert len(found) == 3 and found[0].startswith("gate (shape [3, 4])")
    for model in (draft, target):
        compare_weights(model, held(model))
    assert report(target) == []


class Deriving(Fused):
    """Derives a value from all of its weights after every load, as GLM-4.7-Flash does."""

    def load_weights(self, named_tensors):
        super().load_weights(named_tensors)
        self.post_load_weights()

    def post_load_weights(self, is_nextn=False, weight_names=None):
        self.derived = self.gate_up.data * 2


@pytest.mark.parametrize("part", ["gate", "norm"])
def test_what_a_model_derives_from_its_weights_outlives_a_comparison_of_some(part):
    model = Deriving(torch.float32)
    model.post_load_weights()
    assert differing_names(model, [pair for pair in held(model) if pair[0] == part]) == []
    assert torch.equal(model.derived, model.gate_up * 2)
