"""Pushes into SGLang's own models, two tensor-parallel ranks: what the plan loads is what the stock loader loads.

One pair of processes serves all families; they start once (the import of SGLang is most of this file's time).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.backends.sglang_utils import cpu_shim
from slime.utils.errors import WeightSyncError
from slime.weights.manifest import Manifest
from slime.weights.quantize.block_fp8 import quantize_block
from tests.loaded_model.buckets import cut_buckets, digests, fill, whole_buckets
from tests.loaded_model.engine import LoadedModel
from tests.loaded_model.rank import BLOCK_FP8
from tests.matrix.case import FamilyCase, load_cases, read_tensors

pytestmark = pytest.mark.timeout(1800)

TP_SIZE = 2
BLOCK = 4
"""Side of the FP8 blocks here; the usual 128 would need large matrices."""
ALL_SPARSE = {"mlp_only_layers": [], "decoder_sparse_step": 1}
"""SGLang's Qwen3-MoE has no dense layers."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    cpu_shim.install()
    torch.multiprocessing.set_sharing_strategy("file_system")
    folder = tmp_path_factory.mktemp("first")
    case_of("qwen3").write_checkpoint(folder)
    with LoadedModel(folder, tp_size=TP_SIZE) as loaded:
        yield loaded


def case_of(family: str, **settings: Any) -> FamilyCase:
    case = load_cases([family])[family]
    return dataclasses.replace(case, config={**case.config, **settings})


def checkpoint(folder: Path, case: FamilyCase) -> dict[str, Tensor]:
    """The family's random checkpoint in ``folder``; gives its tensors as a bf16 trainer sends them."""
    case.write_checkpoint(folder)
    return {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
        for name, tensor in read_tensors(folder).items()
    }


def push(model: LoadedModel, manifest: Manifest, tensors: dict[str, Tensor], push_id: str) -> dict[str, Any]:
    """All buckets of a push; gives what was acknowledged, which must be the digests of what was sent."""
    from sglang.srt.utils import MultiprocessingSerializer

    model.begin_weight_update(manifest.id, push_id, manifest.to_json())
    flats = [flat.share_memory_() for flat in fill(manifest, tensors)]
    for index, flat in enumerate(flats):
        handle = MultiprocessingSerializer.serialize(flat, output_str=True)
        model.receive_weight_buckets(push_id, {index: [handle] * TP_SIZE})
    answer = model.acknowledge_weight_update(push_id)
    assert answer["buckets"] == digests(manifest, flats)
    return answer


def differences_to_stock(rank: Any, tensors: dict[str, Tensor]) -> list[str]:
    """Runs on a rank: parameters, and weights derived from them, that a stock load of ``tensors`` changes."""
    state = dict(rank.parameters())
    for name, module in rank.model.named_modules():
        state |= {f"{name}.{key}": getattr(module, key) for key in ("w_kc", "w_vc") if hasattr(module, key)}
    before = {name: value.clone() for name, value in state.items() if value is not None}
    rank.model.load_weights(list(tensors.items()))
    return [name for name, value in before.items() if not torch.equal(value.float(), state[name].float())]


def scaled(tensors: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: (tensor.float() * factor).to(tensor.dtype) for name, tensor in tensors.items()}


FAMILIES = {
    "qwen3": {},
    "qwen3_moe": ALL_SPARSE,
    "glm4": {},
    "glm4_moe": {},
    "deepseek_v3": {},
    "minimax_m2": {},
    "qwen3 tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_loaded_as_by_its_own_loader(model: LoadedModel, tmp_path: Path, family: str) -> None:
    """First proven by the stock loader, then by the plan alone, from whole tensors and from rectangles."""
    tensors = checkpoint(tmp_path, case_of(family.split()[0], **FAMILIES[family]))
    model.swap(tmp_path)
    pushes = [(whole_buckets, 1.0), (whole_buckets, 1.5), (cut_buckets, 0.5), (cut_buckets, 2.0)]
    for number, (layout, factor) in enumerate(pushes):
        sent = scaled(tensors, factor)
        manifest = layout(sent, 3)
        assert push(model, manifest, sent, f"p{number}")["problems"] == []
        model.commit_weight_update(f"p{number}", str(number))
        assert model.get_weight_version() == str(number)
        if number % 2:
            assert model.call(differences_to_stock, sent) == [[], []]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_fp8_weights_and_their_scales_are_loaded(model: LoadedModel, tmp_path: Path, family: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2}
    extra = ALL_SPARSE | {"moe_intermediate_size": 16} if family == "qwen3_moe" else {}
    plain = checkpoint(tmp_path, case_of(family, **sizes, **extra))
    model.swap(tmp_path, quantization=BLOCK_FP8 | {"weight_block_size": [BLOCK, BLOCK]})
    for number, factor in enumerate((1.0, 3.0)):
        tensors = quantized(scaled(plain, factor))
        assert push(model, whole_buckets(tensors, 3), tensors, f"p{number}")["problems"] == []
        assert model.call(differences_to_stock, tensors) == [[], []]
    held = model.parameters()[0]
    assert held["model.layers.0.self_attn.o_proj.weight"].dtype == torch.float8_e4m3fn
    assert torch.equal(
        held["model.layers.0.self_attn.o_proj.weight_scale_inv"],
        tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"][:, : 32 // BLOCK // TP_SIZE],
    )


def quantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    result = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            weight, scale = quantize_block(tensor, (BLOCK, BLOCK))
            result |= {name: weight, f"{name}_scale_inv": scale}
        else:
            result[name] = tensor
    return result


def test_what_is_wrong_with_a_push_is_named_for_each_rank(model: LoadedModel, tmp_path: Path) -> None:
    tensors = checkpoint(tmp_path, case_of("qwen3"))
    model.swap(tmp_path)
    k_proj = "model.layers.1.self_attn.k_proj.weight"
    missing = {name: tensor for name, tensor in tensors.items() if name != k_proj}
    with pytest.raises(WeightSyncError, match=r"rank 1: model.layers.1.self_attn.qkv_proj.weight: no tensor of the"):
        model.begin_weight_update(whole_buckets(missing).id, "missing", whole_buckets(missing).to_json())
    wrong = tensors | {k_proj: tensors[k_proj][:, 1:].contiguous()}
    with pytest.raises(WeightSyncError, match=r"rank 0: model.layers.1.self_attn.k_proj.weight \[.*\] does not fit"):
        model.begin_weight_update(whole_buckets(wrong).id, "wrong", whole_buckets(wrong).to_json())
    assert push(model, whole_buckets(tensors, 2), tensors, "right")["problems"] == []
