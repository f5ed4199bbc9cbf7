"""Pushes into a model on a GPU: the kernels behind the plan, for every way a loader places a tensor."""

from __future__ import annotations

import pytest
import torch

from slime.ext.fast_push.kernels.tables import DigestTable, as_unsigned
from slime.ext.fast_push.model_load import ModelLoad
from slime.weights.digest import combine
from tests.ext.fast_push.test_load_plan import FOLLOWED, NOT_FOLLOWED, Recipe
from tests.ext.fast_push.toy_models import Computing, Fused, Joined
from tests.loaded_model.buckets import cut_buckets, digests, fill, whole_buckets

pytestmark = pytest.mark.gpu(1)

MODELS = {
    "fused": (Fused, Fused.tensors()),
    "fused, held in bf16": (lambda: Fused(torch.bfloat16), Fused.tensors()),
    "joined": (Joined, {"q_a": torch.rand(2, 4), "kv_a": torch.rand(3, 4)}),
    "computing": (Computing, {"decay": torch.rand(4), "scale": torch.rand(1), "plain": torch.rand(4)}),
}
MODELS |= {
    name: (lambda shape=shape, recipe=recipe: Recipe(shape, recipe), {"w": torch.rand(4, 6)})
    for name, (shape, recipe) in FOLLOWED.items()
}
MODELS["scaled"] = (lambda: Recipe((4, 6), NOT_FOLLOWED["scaled"]), {"w": torch.rand(4, 6)})


@pytest.mark.parametrize("layout", [whole_buckets, cut_buckets])
@pytest.mark.parametrize("name", MODELS)
def test_three_pushes_of_different_weights(name, layout):
    make, tensors = MODELS[name]
    model, reference = make().cuda(), make().cuda()
    if hasattr(model, "doubled"):
        model.doubled, reference.doubled = model.doubled.cuda(), reference.doubled.cuda()
    load = ModelLoad(model)
    for factor in (1, 0.5, 3):
        scaled = {key: tensor * factor for key, tensor in tensors.items()}
        manifest = layout(scaled, 2)
        load.begin(manifest)
        flats = fill(manifest, scaled)
        for index, flat in enumerate(flats):
            moved = flat.cuda()
            load.load(index, moved)
            torch.cuda.synchronize()
            pieces = manifest.buckets[index].slices
            sizes = [p.slice.num_elements * manifest.by_name[p.name].torch_dtype.itemsize for p in pieces]
            table = DigestTable([p.offset for p in pieces], sizes, "cuda")
            assert f"{combine(as_unsigned(table.run(moved))):016x}" == digests(manifest, flats)[index]
            moved.fill_(255)
        load.finish()
        assert load.problems == []
        reference.load_weights([(key, tensor.cuda()) for key, tensor in scaled.items()])
        for key, value in reference.named_parameters():
            assert torch.equal(model.get_parameter(key), value), key
