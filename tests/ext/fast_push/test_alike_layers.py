"""Traces of two layers of each kind: the same writes as a full trace, or a fallback to a full trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slime.ext.fast_push.alike_layers import trace_by_layers
from slime.ext.fast_push.load_trace import trace_load
from slime.ext.fast_push.model_load import ModelLoad
from tests.ext.fast_push.test_model_load import push as push_buckets
from tests.ext.fast_push.toy_models import parameter
from tests.loaded_model.buckets import whole_buckets

NUM_LAYERS = 6


class Layered(nn.Module):
    """Layers of a fused matrix and stacked experts, of which this rank has the second half; counts its tensors."""

    def __init__(self, num_layers: int = NUM_LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(num_layers))
        for layer in self.layers:
            layer.fused, layer.experts = parameter(4, 3), parameter(2, 3)
        self.norm = parameter(3)
        self.seen: list[str] = []

    def load_weights(self, weights):
        for name, tensor in weights:
            self.seen.append(name)
            if name == "norm":
                self.norm.data.copy_(tensor)
            else:
                _, number, kind = name.split(".")
                self.load(int(number), kind, tensor)

    def load(self, number, kind, tensor):
        layer = self.layers[number]
        if kind in "qk":
            layer.fused.data.narrow(0, 0 if kind == "q" else 2, 2).copy_(tensor)
        elif int(kind[1:]) >= 2:
            layer.experts.data[int(kind[1:]) - 2].copy_(tensor)


def tensors(num_layers: int = NUM_LAYERS) -> dict[str, torch.Tensor]:
    shapes = {"q": (2, 3), "k": (2, 3), "e0": (3,), "e1": (3,), "e2": (3,), "e3": (3,)}
    named = {f"m.{number}.{kind}": torch.rand(shape) for number in range(num_layers) for kind, shape in shapes.items()}
    return {**named, "norm": torch.rand(3)}


def told(trace):
    return sorted((w.name, w.target.data_ptr(), w.target.dtype, w.copy, w.source_dtype) for w in trace.writes)


def test_the_loader_sees_two_layers_and_all_writes_are_known():
    model, entries = Layered(), whole_buckets(tensors()).tensors
    trace = trace_by_layers(model, entries)
    assert {name.split(".")[1] for name in model.seen if name != "norm"} == {"0", "5"}
    assert len(model.seen) == 2 * 6 + 1
    assert told(trace) == told(trace_load(model, entries))
    assert len(trace.writes) == NUM_LAYERS * 4 + 1


def push(load: ModelLoad, values: dict[str, torch.Tensor]) -> list[str]:
    """Push the values in three buckets; return the problems that the model's load found."""
    return push_buckets(load, whole_buckets(values, 3), values)


def assert_holds(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    other = type(model)()
    other.load_weights(values.items())
    assert all(torch.equal(model.get_parameter(name), value) for name, value in other.named_parameters())


def test_what_is_concluded_loads_the_model():
    load = ModelLoad(Layered())
    for _ in range(2):
        values = tensors()
        assert push(load, values) == []
        assert_holds(load.model, values)


class LastDiffers(Layered):
    """The last layer has q and k in the other order."""

    def load(self, number, kind, tensor):
        swapped = {"q": "k", "k": "q"}.get(kind, kind)
        super().load(number, swapped if number == NUM_LAYERS - 1 else kind, tensor)


class OneBehind(Layered):
    """Tensors go to the parameters of the next layer."""

    def load(self, number, kind, tensor):
        super().load((number + 1) % NUM_LAYERS, kind, tensor)


class Fills(Layered):
    """The loader sets a part of each layer to a constant."""

    def load(self, number, kind, tensor):
        super().load(number, kind, tensor)
        self.layers[number].experts.data[1].fill_(0)


class Doubles(Layered):
    """A tensor is computed with before it is loaded."""

    def load(self, number, kind, tensor):
        super().load(number, kind, tensor * 2 if kind == "q" else tensor)


@pytest.mark.parametrize("make", [LastDiffers, OneBehind, Fills, Doubles])
def test_a_loader_that_treats_layers_apart_or_computes_runs_on_all_tensors(make):
    model, entries = make(), whole_buckets(tensors()).tensors
    trace, whole = trace_by_layers(model, entries), trace_load(make(), entries)
    assert len(model.seen) > len(entries)
    assert len(trace.writes) == len(whole.writes) and len(trace.fills) == len(whole.fills)
    assert trace.opaque == whole.opaque


class MiddleDiffers(Layered):
    """An untraced layer has q and k in the other order."""

    def load(self, number, kind, tensor):
        swapped = {"q": "k", "k": "q"}.get(kind, kind)
        super().load(number, swapped if number == 3 else kind, tensor)


def test_a_middle_layer_of_its_own_is_found_out_by_the_first_push_and_traced():
    load = ModelLoad(MiddleDiffers())
    for is_concluded in (True, False, False):
        values = tensors()
        load.begin(whole_buckets(values, 3))
        assert load.plan is not None and load.plan.trace.is_concluded == is_concluded
        assert push(load, values) == []
        assert_holds(load.model, values)
    assert load.plan.stock == {}


class MiddleHasOthers(Layered):
    """An untraced layer has the first half of the experts."""

    def load(self, number, kind, tensor):
        if number == 3 and kind.startswith("e"):
            kind = f"e{(int(kind[1:]) + 2) % 4}"
        super().load(number, kind, tensor)


def test_tensors_that_were_wrongly_left_out_fail_the_push_and_come_with_the_next():
    load, values = ModelLoad(MiddleHasOthers()), tensors()
    (problem,) = push(load, values)
    assert problem.startswith("2 tensors (m.3.e0, m.3.e1) were not loaded")
    for _ in range(2):
        assert push(load, values) == []
        assert_holds(load.model, values)


def test_layers_with_other_shapes_are_of_another_kind():
    values = tensors()
    model = Layered()
    model.layers[2].fused = parameter(4, 5)
    for kind in "qk":
        values[f"m.2.{kind}"] = torch.rand(2, 5)
    trace = trace_by_layers(model, whole_buckets(values).tensors)
    assert {name.split(".")[1] for name in model.seen if name != "norm"} == {"0", "2", "5"}
    assert len(trace.writes) == NUM_LAYERS * 4 + 1 and not trace.failures


def test_partners_and_what_is_derived_are_concluded_too():
    class Joins(Layered):
        def __init__(self):
            super().__init__()
            for layer in self.layers:
                layer.register_buffer("beside", torch.zeros(4, 3))

        def load_weights(self, weights):
            waiting = {}
            for name, tensor in weights:
                if name.endswith((".q", ".k")):
                    layer, kind = name.rsplit(".", 1)
                    waiting.setdefault(layer, {})[kind] = tensor
                    if len(waiting[layer]) == 2:
                        own = self.layers[int(layer.split(".")[1])]
                        own.fused.data.copy_(torch.cat([waiting[layer]["q"], waiting[layer]["k"]]))
                        torch.add(own.fused, 1.0, out=own.beside)
                else:
                    super().load_weights([(name, tensor)])

    model, entries = Joins(), whole_buckets(tensors()).tensors
    trace, whole = trace_by_layers(model, entries), trace_load(model, entries)
    assert told(trace) == told(whole)
    assert (
        set(trace.partners)
        == set(whole.partners)
        == {frozenset({f"m.{number}.q", f"m.{number}.k"}) for number in range(NUM_LAYERS)}
    )
    assert trace.derived_from == whole.derived_from and len(whole.derived_from) == NUM_LAYERS
