"""The plan against the loader itself, for models small enough to check every element."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from slime.ext.fast_push.kernels.tables import CopyTable
from slime.ext.fast_push.load_plan import LoadPlan, unread_memory
from slime.ext.fast_push.load_trace import trace_load
from slime.ext.fast_push.manifest import Manifest, TensorEntry
from slime.ext.fast_push.weight_check import fill_parameters_with_nan, find_nan_in
from tests.ext.fast_push.toy_models import Computing, Fused, Joined, parameter
from tests.loaded_model.buckets import cut_buckets, fill, whole_buckets


def load_by_plan(model: nn.Module, manifest: Manifest, tensors: dict[str, Tensor]) -> LoadPlan:
    plan = LoadPlan(model, manifest)
    for bucket, flat in zip(manifest.buckets, fill(manifest, tensors), strict=True):
        table = CopyTable([one.item for one in plan.items(bucket)])
        table.copy(flat)
        assert int(table.count_differences(flat).sum()) == 0
    return plan


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_loads_alike(model: nn.Module, manifest: Manifest, tensors: dict[str, Tensor]) -> LoadPlan:
    """The plan and the model's own loader give the same result."""
    plan = load_by_plan(model, manifest, tensors)
    planned = state(model)
    for p in model.parameters():
        p.data.fill_(0)
    model.load_weights(list(tensors.items()))
    for name, p in model.named_parameters():
        assert torch.equal(p, planned[name]), name
    return plan


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_whole_tensors_land_where_the_loader_puts_them(wire, held):
    model, tensors = Fused(held), Fused.tensors(wire)
    plan = assert_loads_alike(model, whole_buckets(tensors, 3), tensors)
    assert plan.unused == {"other.layer"}
    assert plan.problems == [] and plan.unwritten == {} and plan.stock == {}


@pytest.mark.parametrize("num_parts", [2, 3])
def test_slices_land_where_the_whole_tensor_would(num_parts):
    model, tensors = Fused(), Fused.tensors()
    assert_loads_alike(model, cut_buckets(tensors, num_parts), tensors)


def test_what_an_engine_keeps_does_not_count_as_unwritten_and_is_left_alone():
    tensors = Fused.tensors()
    kept = tuple(TensorEntry(name, tuple(tensors.pop(name).shape), "float32") for name in ("o", "up.1"))
    model = Fused()
    model.load_weights(list(Fused.tensors().items()))
    before = state(model)
    manifest = dataclasses.replace(whole_buckets(tensors), kept=kept)
    plan = load_by_plan(model, manifest, {name: tensor + 1 for name, tensor in tensors.items()})
    assert plan.unwritten == {} and plan.problems == [] and plan.unaccounted == frozenset()
    assert torch.equal(model.o, before["o"]) and not torch.equal(model.qkv, before["qkv"])


def test_a_loader_may_write_a_tensor_to_the_same_place_twice():
    class Tied(Fused):
        def load(self, name, tensor):
            super().load(name, tensor)
            if name == "embed":
                super().load(name, tensor)  # as the head, which is the embedding

    plan = assert_loads_alike(Tied(), whole_buckets(Fused.tensors()), Fused.tensors())
    assert plan.problems == [] and len(plan.writes["embed"]) == 1


def test_a_tensor_that_does_not_come_leaves_its_elements_unwritten():
    tensors = Fused.tensors()
    del tensors["k"], tensors["up.1"]
    plan = LoadPlan(Fused(), whole_buckets(tensors))
    assert list(plan.unwritten.values()) == [
        "qkv: no tensor of the push fills 12 of 48 elements",
        "experts: no tensor of the push fills 18 of 72 elements",
    ]


@pytest.mark.parametrize("is_draft", [False, True])
def test_the_indexer_of_a_layer_that_takes_over_keys_need_not_come(is_draft):
    class Attention(nn.Module):
        def __init__(self, skip_topk, is_nextn=False):
            super().__init__()
            self.skip_topk, self.is_nextn = skip_topk, is_nextn
            self.indexer = nn.ParameterDict({"wk": parameter(2, 3)})

    model = Fused()
    model.first, model.second = Attention(False), Attention(True, is_nextn=is_draft)
    plan = LoadPlan(model, whole_buckets(Fused.tensors()))
    assert list(plan.unwritten) == ["first.indexer.wk", *(["second.indexer.wk"] if is_draft else [])]
    assert len(unread_memory(model)) == (not is_draft)


@pytest.mark.parametrize("is_sharing", [False, True])
def test_rows_of_keys_need_not_come_for_a_layer_that_attends_to_those_of_another(is_sharing):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_size, self.kv_size, self.is_kv_shared_layer = 4, 2, is_sharing
            self.qkv_proj = nn.ParameterDict({"weight": parameter(8, 3), "scale": parameter(4, 1)})
            self.k_norm = nn.ParameterDict({"weight": parameter(2)})

        def load_weights(self, named_tensors):
            for name, tensor in named_tensors:
                self.qkv_proj[name].data[: len(tensor)].copy_(tensor)

    model, tensors = Attention(), {"weight": torch.rand(4, 3), "scale": torch.rand(2, 1)}
    names = [] if is_sharing else ["qkv_proj.scale", "qkv_proj.weight", "k_norm.weight"]
    assert list(LoadPlan(model, whole_buckets(tensors)).unwritten) == names
    held = model.qkv_proj["weight"].detach().clone()
    fill_parameters_with_nan(model)
    assert model.qkv_proj["weight"][:4].isnan().all() and len(find_nan_in(model)) == 2 + (not is_sharing)
    model.load_weights(tensors.items())
    assert [line.partition(":")[0] for line in find_nan_in(model)] == names
    assert torch.equal(model.qkv_proj["weight"][4:], held[4:]) == is_sharing


def test_a_wrong_shape_is_refused_in_the_loaders_words():
    tensors = Fused.tensors() | {"q": torch.zeros(8, 5), "o": torch.zeros(7, 8)}
    problems = LoadPlan(Fused(), whole_buckets(tensors)).problems
    assert len(problems) == 2
    assert problems[0].startswith("q [8, 5] does not fit the engine's model: AssertionError: tensor.shape=")
    assert problems[1].startswith("o [7, 8] does not fit the engine's model: RuntimeError: The size of tensor a (6)")


def test_elements_that_two_tensors_write_are_reported():
    class Twice(Fused):
        def load(self, name, tensor):
            super().load("q" if name == "q2" else name, tensor)

    tensors = Fused.tensors() | {"q2": torch.zeros(8, 6)}
    (problem,) = LoadPlan(Twice(), whole_buckets(tensors)).problems
    assert problem == "qkv: 24 of 48 elements are written more than once, by k, q, q2, v"


def test_joined_tensors_are_followed_and_belong_together():
    tensors = {"q_a": torch.rand(2, 4), "kv_a": torch.rand(3, 4)}
    plan = assert_loads_alike(Joined(), whole_buckets(tensors, 2), tensors)
    assert plan.groups == {name: frozenset(tensors) for name in tensors}
    assert plan.stock == {}
    assert_loads_alike(Joined(), cut_buckets(tensors, 2), tensors)


def test_what_is_computed_or_read_is_left_to_the_model():
    tensors = {"decay": torch.rand(4), "scale": torch.rand(1), "plain": torch.rand(4)}
    plan = LoadPlan(Computing(), whole_buckets(tensors))
    assert plan.stock == {
        "decay": "it is computed from the tensor's values",
        "scale": "UntraceableError: the loader reads the tensor's values",
    }
    assert plan.writes.keys() == {"plain"}
    assert plan.untraced_parameters == {"decay", "scale"}
    assert plan.problems == [] and plan.unwritten == {}


class Recipe(nn.Module):
    """Loads one tensor by a function of (parameter, tensor)."""

    def __init__(self, shape, recipe, dtype=torch.float32):
        super().__init__()
        self.w, self.recipe = parameter(*shape, dtype=dtype), recipe

    def load_weights(self, weights):
        for _, tensor in weights:
            self.recipe(self.w, tensor)


FOLLOWED = {
    "transposed": ((6, 4), lambda w, t: w.data.copy_(t.t())),
    "transposed and packed": ((6, 4), lambda w, t: w.data.copy_(t.t().contiguous())),
    "halves exchanged": ((4, 6), lambda w, t: w.data.copy_(torch.cat([t[2:], t[:2]]))),
    "columns joined": ((4, 6), lambda w, t: w.data.copy_(torch.cat([t[:, 3:], t[:, :3]], dim=1))),
    "joined twice": ((4, 6), lambda w, t: w.data.copy_(torch.cat([torch.cat([t[3:], t[1:3]]), t[:1]]))),
    "stacked": ((2, 2, 6), lambda w, t: w.data.copy_(torch.stack([t[::2], t[1::2]]))),
    "flattened": ((24,), lambda w, t: w.data.copy_(t.reshape(-1))),
    "flattened transpose": ((24,), lambda w, t: w.data.copy_(t.t().reshape(-1))),
    "heads interleaved": ((2, 2, 6), lambda w, t: w.data.copy_(t.view(2, 2, 6).transpose(0, 1))),
    "by index": ((4, 6), lambda w, t: [w.data.__setitem__(i, t[3 - i]) for i in range(4)]),
    "repeated": ((3, 6), lambda w, t: w.data.copy_(t[1])),
    "cast on the way": ((4, 6), lambda w, t: w.data.copy_(t.to(torch.float64).clone())),
    "moved to the parameter's device": ((4, 6), lambda w, t: w.data.copy_(t.to(w.device))),
    "its bits": ((4, 6), lambda w, t: w.data.view(torch.int32).copy_(t.view(torch.int32))),
    "chunked": ((4, 3), lambda w, t: w.data.copy_(t.chunk(2, dim=1)[1])),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_recipe_is_followed(name):
    shape, recipe = FOLLOWED[name]
    tensors = {"w": torch.rand(4, 6)}
    for manifest in (whole_buckets(tensors), cut_buckets(tensors, 2)):
        plan = assert_loads_alike(Recipe(shape, recipe), manifest, tensors)
        assert plan.writes.keys() == {"w"} and plan.problems == [] and plan.unwritten == {}


NOT_FOLLOWED = {
    "scaled": lambda w, t: w.data.copy_(t * 2),
    "rounded on the way": lambda w, t: w.data.copy_(t.to(torch.bfloat16)),
    "added to": lambda w, t: w.data.add_(t),
    "scaled in place": lambda w, t: w.data.copy_(t.clone().mul_(2)),
    "gathered": lambda w, t: w.data.copy_(t[torch.tensor([3, 1, 2, 0])]),
    "through a buffer": lambda w, t: w.data.copy_(torch.zeros(4, 6).copy_(t)),
    "read as numbers": lambda w, t: w.data.copy_(torch.tensor(t.tolist())),
    "taken as numpy": lambda w, t: w.data.copy_(torch.from_numpy(t.numpy())),
}


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_a_recipe_that_is_not_followed_is_left_to_the_model(name):
    plan = LoadPlan(Recipe((4, 6), NOT_FOLLOWED[name]), whole_buckets({"w": torch.rand(4, 6)}))
    assert plan.stock.keys() == {"w"} and plan.writes == {}
    assert plan.problems == [] and plan.unwritten == {}


def test_a_loader_that_replaces_a_parameters_memory_does_so_itself():
    model = Recipe((4, 6), lambda w, t: setattr(w, "data", t.clone()))
    plan = LoadPlan(model, whole_buckets({"w": torch.rand(4, 6)}))
    assert plan.stock.keys() == {"w"} and plan.unwritten == {}
    assert model.w.device.type == "cpu"


def test_a_failure_costs_no_other_tensor():
    class Picky(Joined):
        def load_weights(self, weights):
            def checked():
                for name, tensor in weights:
                    assert not name.startswith("bad"), name
                    yield name, tensor

            super().load_weights(checked())

    names = ["bad1", "q_a", "bad2", "kv_a", "bad3"]
    tensors = {name: torch.rand(3 if name == "kv_a" else 2, 4) for name in names}
    trace = trace_load(Picky(), whole_buckets(tensors).tensors)
    assert trace.failures.keys() == {"bad1", "bad2", "bad3"}
    assert {write.name for write in trace.writes} == {"q_a", "kv_a"}


def test_a_scale_whose_name_only_ends_like_an_engines_own_is_missed():
    model = Fused()
    model.attn = nn.Module()
    model.attn.block_scale = parameter(1)  # not a "k_scale"
    model.attn.w13_input_scale = parameter(1)
    assert list(LoadPlan(model, whole_buckets(Fused.tensors())).unwritten) == ["attn.block_scale"]
