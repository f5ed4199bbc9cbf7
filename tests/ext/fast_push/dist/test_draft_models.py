"""Pushes into SGLang's own draft models, whose weights are the checkpoint's MTP layers.

A trainer without MTP layers leaves the draft as loaded; one with them updates it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.ext.fast_push.verified_push import left_out_tensors
from slime.backends.megatron_utils.models import find_weight_map
from slime.train_data.model_dims import ModelDims
from slime.utils.errors import WeightSyncError
from slime.ext.fast_push.manifest import Manifest
from slime.weights.push.wire import by_value
from tests.loaded_model.buckets import digests, fill, whole_buckets
from tests.loaded_model.engine import LoadedModel
from tests.matrix.case import load_cases, read_config, read_tensors

pytestmark = pytest.mark.timeout(900)

FAMILIES = ("glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5")
"""MiMo's config needs its folder's code, and GLM-5's layers need a GPU."""


def serve_with_draft(model: LoadedModel, folder: Path, family: str) -> dict[str, Tensor]:
    """Make the engine serve the family's checkpoint and draft with its MTP layer; return the checkpoint."""
    load_cases([family])[family].write_checkpoint(folder)
    model.swap(folder)
    model.call(add_draft, str(folder))
    tensors = {name: tensor.bfloat16() for name, tensor in read_tensors(folder).items()}
    model.update_weights_from_tensor([by_value(list(tensors.items()))])
    return tensors


def add_draft(rank: Any, folder: str) -> None:
    rank.add_draft(folder, "bfloat16")


def own_weights(rank: Any) -> dict[str, Tensor]:
    """Return the draft's weights, and those derived from them, except those shared with the model."""
    state = dict(rank.draft.named_parameters())
    for name, module in rank.draft.named_modules():
        state |= {f"{name}.{key}": getattr(module, key) for key in ("w_kc", "w_vc") if hasattr(module, key)}
    shared = {parameter.data_ptr() for parameter in rank.model.parameters()}
    return {name: value.clone() for name, value in state.items() if value.data_ptr() not in shared}


def manifest_of(
    tensors: dict[str, Tensor], folder: Path, *, num_mtp_layers: int
) -> tuple[dict[str, Tensor], Manifest]:
    """Return what a trainer with this many MTP layers pushes of the checkpoint, and the manifest of the push."""
    config = read_config(folder)
    weight_map = find_weight_map(config["model_type"])
    sizes = dict.fromkeys(("num_attention_heads", "num_query_groups", "head_dim", "hidden_size", "vocab_size"), 2)
    shape = ModelDims(
        num_layers=config.get("text_config", config)["num_hidden_layers"],
        num_mtp_layers=num_mtp_layers,
        has_tied_embeddings=False,
        **sizes,
    )
    pushed = {name: tensor for name, tensor in tensors.items() if not weight_map.is_left_out(name, shape)}
    manifest = whole_buckets(pushed)
    return pushed, dataclasses.replace(manifest, kept=left_out_tensors(str(folder), weight_map, shape, manifest))


def push(model: LoadedModel, manifest: Manifest, tensors: dict[str, Tensor], push_id: str) -> None:
    from sglang.srt.utils import MultiprocessingSerializer

    model.begin_weight_update(manifest.id, push_id, manifest.to_json())
    (flat,) = [flat.share_memory_() for flat in fill(manifest, tensors)]
    model.receive_weight_buckets(push_id, {0: [MultiprocessingSerializer.serialize(flat, output_str=True)]})
    answer = model.acknowledge_weight_update(push_id)
    assert answer["problems"] == []
    assert answer["buckets"] == digests(manifest, [flat])


def doubled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor * 2 for name, tensor in tensors.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_whose_layer_is_not_trained_stays_as_it_was_loaded(
    model: LoadedModel, tmp_path: Path, family: str
) -> None:
    tensors = serve_with_draft(model, tmp_path, family)
    (loaded,) = model.call(own_weights)
    pushed, manifest = manifest_of(tensors, tmp_path, num_mtp_layers=0)
    assert manifest.kept
    for number in range(2):  # by the model's own loader, then by the plan
        push(model, manifest, doubled(pushed), f"p{number}")
    (held,) = model.call(own_weights)
    assert loaded.keys() == held.keys()
    assert [name for name in held if not torch.equal(held[name], loaded[name])] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_whose_layer_is_trained_gets_its_weights(model: LoadedModel, tmp_path: Path, family: str) -> None:
    tensors = serve_with_draft(model, tmp_path, family)
    (loaded,) = model.call(own_weights)
    pushed, manifest = manifest_of(tensors, tmp_path, num_mtp_layers=1)
    assert all(".visual." in entry.name for entry in manifest.kept)
    for number in range(2):
        push(model, manifest, doubled(pushed), f"p{number}")
    (held,) = model.call(own_weights)
    same = [name for name in held if torch.equal(held[name], loaded[name]) and loaded[name].any()]
    assert same == []


def test_a_tensor_of_a_trained_mtp_layer_that_is_not_pushed_is_an_error(model: LoadedModel, tmp_path: Path) -> None:
    tensors = serve_with_draft(model, tmp_path, "glm4_moe_lite")
    pushed, _ = manifest_of(tensors, tmp_path, num_mtp_layers=1)
    name = next(name for name in pushed if name.endswith(".enorm.weight"))
    missing = {other: tensor for other, tensor in pushed.items() if other != name}
    _, manifest = manifest_of(missing, tmp_path, num_mtp_layers=1)
    with pytest.raises(WeightSyncError, match=r"model.enorm.weight: no tensor of the push fills"):
        model.begin_weight_update(manifest.id, "missing", manifest.to_json())
