"""Pushes into a model object: first verified by its own loader, later by the plan, checked after either."""

from __future__ import annotations

import pytest
import torch

from slime.ext.fast_push import model_load
from slime.ext.fast_push.model_load import HeldTensors, ModelLoad
from tests.ext.fast_push.toy_models import Computing, Fused, Joined, parameter
from tests.loaded_model.buckets import cut_buckets, fill, whole_buckets


def push(load, manifest, tensors):
    """All buckets of a push; returns the problems."""
    load.begin(manifest)
    for index, flat in enumerate(fill(manifest, tensors)):
        load.load(index, flat)
        flat.fill_(255)
    load.finish()
    return load.problems


def expected(make, tensors):
    model = make()
    model.load_weights(list(tensors.items()))
    return dict(model.named_parameters())


def assert_holds(model, make, tensors):
    for name, value in expected(make, tensors).items():
        assert torch.equal(model.get_parameter(name), value), name


JOINED = {"q_a": torch.rand(2, 4), "kv_a": torch.rand(3, 4)}
COMPUTED = {"decay": torch.rand(4), "scale": torch.rand(1), "plain": torch.rand(4)}


@pytest.mark.parametrize("layout", [whole_buckets, cut_buckets])
@pytest.mark.parametrize(
    ("make", "tensors"), [(Fused, Fused.tensors()), (Joined, JOINED), (Computing, COMPUTED)], ids=lambda value: ""
)
def test_three_pushes_of_different_weights(make, tensors, layout):
    model = make()
    load = ModelLoad(model)
    for factor in (1, 0.5, 3):
        scaled = {name: tensor * factor for name, tensor in tensors.items()}
        assert push(load, layout(scaled, 2), scaled) == []
        assert_holds(model, make, scaled)


def test_the_first_push_goes_through_the_models_loader_and_later_ones_do_not():
    model, tensors = Fused(), Fused.tensors()
    load = ModelLoad(model)
    loads = []
    for _ in range(3):
        push(load, whole_buckets(tensors, 2), tensors)
        loads.append(model.num_loads)
    assert loads == [3, 3, 3], "a trace, and one for each bucket of the first push"


def test_parameters_that_have_moved_are_found_again():
    model, tensors = Fused(), Fused.tensors()
    load = ModelLoad(model)
    push(load, whole_buckets(tensors), tensors)
    old = model.qkv.data
    model.qkv.data = torch.zeros_like(old)
    assert push(load, whole_buckets(tensors), tensors) == []
    assert_holds(model, Fused, tensors)


def test_a_model_that_loads_otherwise_with_real_tensors_is_believed():
    """A loader that checks its device deceives the trace; the first push's verification notices."""

    class Deceitful(Fused):
        def load(self, name, tensor):
            if name == "o" and tensor.device.type != "meta":
                tensor = tensor.flip(0)
            super().load(name, tensor)

    model, tensors = Deceitful(), Fused.tensors()
    load = ModelLoad(model)
    for _ in range(2):
        assert push(load, whole_buckets(tensors), tensors) == []
        assert load.plan is not None and load.plan.stock.keys() == {"o"}
        assert_holds(model, Deceitful, tensors)


class Deriving(torch.nn.Module):
    """Derives a value from a weight at the end of every load, without a separate method for it."""

    def __init__(self, derived, derive):
        super().__init__()
        self.a, self.b, self.derived, self.derive = parameter(3, 4), parameter(4), derived, derive

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)
        self.derive(self.derived.data, self.a.data)


@pytest.mark.parametrize(
    ("make", "derive", "expected"),
    [
        (lambda: torch.zeros(4, 3), lambda to, a: to.copy_(a.t() * 2), lambda a: a.t() * 2),
        (lambda: parameter(3, 4), lambda to, a: to.copy_(a), lambda a: a),
        (lambda: torch.zeros(3, 4), lambda to, a: to.copy_(a), lambda a: a),
    ],
    ids=["computed", "a second parameter", "memory beside the parameters"],
)
def test_what_only_the_loader_derives_follows_every_push(make, derive, expected):
    model = Deriving(make(), derive)
    load = ModelLoad(model)
    for factor in (1, 2, 3):
        tensors = {"a": torch.rand(3, 4) * factor, "b": torch.rand(4)}
        assert push(load, whole_buckets(tensors, 2), tensors) == []
        assert torch.equal(model.derived.data, expected(tensors["a"])) and torch.equal(model.b, tensors["b"])
    assert load.plan is not None and load.plan.stock.keys() == {"a"}


class KeepsOnePlus(torch.nn.Module):
    """A norm's loader writes 1 + weight into a buffer beside it, as SGLang's GemmaRMSNorm does."""

    def __init__(self):
        super().__init__()
        self.norm, self.b = parameter(3), parameter(4)
        self.register_buffer("one_plus", torch.ones(3), persistent=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)
            if name == "norm":
                torch.add(self.norm.data, 1.0, out=self.one_plus)


def test_a_buffer_that_the_loader_writes_by_out_follows_every_push():
    model = KeepsOnePlus()
    load = ModelLoad(model)
    for factor in (1, 2, 3):
        tensors = {"norm": torch.rand(3) * factor, "b": torch.rand(4)}
        assert push(load, whole_buckets(tensors, 2), tensors) == []
        assert torch.equal(model.one_plus, tensors["norm"] + 1)
        assert torch.equal(model.b, tensors["b"])
    assert load.plan is not None and load.plan.stock.keys() == {"norm"}


class WantsMemory(torch.nn.Module):
    """Its kernel raises its own error for meta tensors; optionally it forgets half of a tensor."""

    def __init__(self, part=slice(None)):
        super().__init__()
        self.a, self.b, self.part = parameter(4, 2), parameter(4), part

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "a":
                if tensor.data_ptr() == 0:
                    raise ValueError("Pointer argument cannot be accessed")
                tensor = tensor * 2
            self.get_parameter(name).data[self.part].copy_(tensor[self.part])


def test_a_tensor_that_fails_only_without_memory_is_left_to_the_model():
    model = WantsMemory()
    load = ModelLoad(model)
    for _ in range(2):
        tensors = {"a": torch.rand(4, 2), "b": torch.rand(4)}
        assert push(load, whole_buckets(tensors), tensors) == []
        assert torch.equal(model.a.data, tensors["a"] * 2) and torch.equal(model.b.data, tensors["b"])


def test_a_tensor_that_cannot_be_traced_must_fill_its_parameter():
    load = ModelLoad(WantsMemory(slice(0, 2)))
    tensors = {"a": torch.rand(4, 2), "b": torch.rand(4)}
    problems = push(load, whole_buckets(tensors), tensors)
    assert problems == ["a: 4 of 8 elements were never pushed", "b: 2 of 4 elements were never pushed"]


class Flattening(torch.nn.Module):
    """Takes, as its rank's part, a run of elements that begins and ends within rows of the tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b = parameter(5), parameter(4)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor.view(-1)[2:7] if name == "a" else tensor)


@pytest.mark.parametrize(("layout", "by_model"), [(whole_buckets, set()), (cut_buckets, {"a"})])
def test_what_is_no_rectangle_of_a_tensor_is_left_to_the_model_where_the_tensor_comes_in_slices(layout, by_model):
    load = ModelLoad(Flattening())
    for factor in (1, 2, 3):
        tensors = {"a": torch.rand(3, 3) * factor, "b": torch.rand(4)}
        assert push(load, layout(tensors, 2), tensors) == []
        load.taken()
        assert_holds(load.model, Flattening, tensors)
    assert load.plan is not None and load.plan.stock.keys() == by_model


class HalfOfPair(torch.nn.Module):
    """Joins two tensors and takes this rank's half, which has nothing of the second."""

    def __init__(self, *, is_copied):
        super().__init__()
        self.a, self.is_copied = parameter(2, 3), is_copied

    def load_weights(self, weights):
        held = {}
        for name, tensor in weights:
            held[name] = tensor
            if len(held) == 2:
                half = torch.cat([held["gate"], held["up"]]).narrow(0, 0, 2)
                self.a.data.copy_(half.clone() if self.is_copied else half)


@pytest.mark.parametrize("layout", [whole_buckets, cut_buckets])
@pytest.mark.parametrize("is_copied", [False, True])
def test_a_tensor_that_is_loaded_with_another_comes_though_nothing_of_it_is_kept(is_copied, layout):
    load = ModelLoad(HalfOfPair(is_copied=is_copied))
    for factor in (1, 2, 3):
        tensors = {"gate": torch.rand(2, 3) * factor, "up": torch.rand(2, 3)}
        assert push(load, layout(tensors, 2), tensors) == []
        assert torch.equal(load.model.a, tensors["gate"])


class Crowded(Computing):
    """Has memory for the load itself, but not for a second one into copies."""

    def __init__(self):
        super().__init__()
        self.home = self.decay.data_ptr()

    def load_weights(self, weights):
        if self.decay.data_ptr() != self.home:
            raise torch.OutOfMemoryError("CUDA out of memory")
        super().load_weights(weights)


def test_a_comparison_that_takes_too_much_memory_is_left_out(caplog):
    model = Crowded()
    assert push(ModelLoad(model), whole_buckets(COMPUTED), COMPUTED) == []
    assert "tensors are served unverified" in caplog.text
    assert_holds(model, Computing, COMPUTED)


def test_padding_is_filled_again():
    model, tensors = Fused(), Fused.tensors()
    load = ModelLoad(model)
    push(load, whole_buckets(tensors), tensors)
    model.embed.data.fill_(torch.nan)
    push(load, whole_buckets(tensors), tensors)
    assert_holds(model, Fused, tensors)


def test_bytes_that_do_not_stay_are_a_problem(monkeypatch):
    model, tensors = Fused(), Fused.tensors()
    load = ModelLoad(model)
    push(load, whole_buckets(tensors), tensors)
    copy = model_load.CopyTable.copy

    def copy_and_damage(table, flat):
        copy(table, flat)
        model.o.data[0, 0] = -1

    monkeypatch.setattr(model_load.CopyTable, "copy", copy_and_damage)
    (problem,) = push(load, whole_buckets(tensors), tensors)
    assert problem.startswith("o: ") and problem.endswith("bytes of 96 are not what was received")


def test_an_incomplete_push_is_no_proof():
    model, tensors = Fused(), Fused.tensors()
    load, manifest = ModelLoad(model), whole_buckets(tensors, 2)
    load.begin(manifest)
    load.load(0, fill(manifest, tensors)[0])
    load.finish()
    num_loads = model.num_loads
    push(load, manifest, tensors)
    assert model.num_loads == num_loads + 2


def test_pieces_that_never_become_whole_are_a_problem():
    tensors = {"decay": torch.rand(4, 1), "scale": torch.rand(1), "plain": torch.rand(4)}
    load, manifest = ModelLoad(Computing()), cut_buckets(tensors, 2)
    load.model.decay = parameter(4, 1)
    load.begin(manifest)
    load.load(0, fill(manifest, tensors)[0])
    load.finish()
    assert load.problems == ["decay, or a tensor loaded with it, did not arrive completely"]


def test_too_much_to_hold_goes_through_the_plan(monkeypatch):
    """A tensor in pieces that cannot wait is loaded by the plan, unverified."""
    monkeypatch.setattr(model_load, "HeldTensors", lambda *a: HeldTensors(*a, limit_bytes=0))
    model, tensors = Fused(), Fused.tensors()
    load = ModelLoad(model)
    assert push(load, cut_buckets(tensors), tensors) == []
    assert_holds(model, Fused, tensors)


def test_too_much_to_hold_for_a_loader_that_computes_is_a_problem(monkeypatch):
    monkeypatch.setattr(model_load, "HeldTensors", lambda *a: HeldTensors(*a, limit_bytes=0))
    tensors = {"decay": torch.rand(4, 1)}
    load = ModelLoad(Computing())
    load.model.decay = parameter(4, 1)
    problems = push(load, cut_buckets(tensors), tensors)
    assert "1 tensors (decay) arrive in slices, must be whole" in problems[0]


# --- tensors that wait for the rest of themselves, or for each other ------------------------------------------------
