"""Pushes into SGLang's own models on two tensor-parallel ranks: the plan loads what the stock loader loads.

One pair of processes serves all families; they start once (the import of SGLang is most of this file's time).
"""

from __future__ import annotations

import dataclasses
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from slime.backends.sglang_utils import cpu_shim
from slime.ext.fast_push.loader_report import CHECK_REPORT, flatten_reports
from slime.ext.fast_push.load_plan import is_description
from slime.ext.fast_push.repacked_layers import refusal
from slime.ext.fast_push.weight_check import compare_weights
from slime.ext.low_precision.folders.run import rewrite_folder
from slime.ext.low_precision.folders.to_quantized import ToQuantized, to_fp8, to_int4
from slime.utils.errors import WeightSyncError
from slime.ext.fast_push.manifest import Manifest
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
    """Write the family's random checkpoint to ``folder``; return its tensors as a bf16 trainer sends them."""
    case.write_checkpoint(folder)
    return {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
        for name, tensor in read_tensors(folder).items()
    }


def push(model: LoadedModel, manifest: Manifest, tensors: dict[str, Tensor], push_id: str) -> dict[str, Any]:
    """Send all buckets of a push; return what was acknowledged, which must be the digests of the sent bytes."""
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
    """First verified by the stock loader, then by the plan alone, from whole tensors and from rectangles."""
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


# --- formats that SGLang repacks after a load -----------------------------------------------------------------------

GROUP = 32
SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 256}
EXPERTS = {**ALL_SPARSE, "moe_intermediate_size": 128}
REPACKED = {
    # family, sizes, kind of quantization
    "rows": ("qwen3", {}, to_fp8("channel")),
    "rows of experts": ("qwen3_moe", EXPERTS, to_fp8("channel")),
    "tensors": ("qwen3", {}, to_fp8("tensor")),
    "experts in int4": ("qwen3_moe", EXPERTS, to_int4(GROUP, ignore_rules=["re:.*self_attn"])),
    "experts in int4 by Triton": ("qwen3_moe", EXPERTS, to_int4(GROUP, ignore_rules=["re:.*self_attn"])),
    "int4": ("qwen3", {}, to_int4(GROUP)),
    "int4 with zero points": ("qwen3", {}, to_int4(GROUP, is_symmetric=False)),
}


def as_on_an_h100(rank: Any, experts: str) -> None:
    """Runs on a rank: answers SGLang's questions about the GPU.  Every step of Triton's experts is plain torch.

    A GPU kernel computes the order of Marlin's tiles; another order of the same shape replaces it here, so that the
    test covers packing and unpacking, not the kernel.
    """
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16 as dense
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16_moe as moe

    torch.cuda.get_device_capability = lambda *_: (9, 0)
    utils.MOE_RUNNER_BACKEND = utils.MoeRunnerBackend(experts)
    dense.gptq_marlin_repack = shuffled
    moe.gptq_marlin_moe_repack = lambda packed, perm, *sizes: torch.stack(
        [shuffled(one, order, *sizes) for one, order in zip(packed, perm, strict=True)]
    )
    kinds = {num_bits: Namespace(size_bits=num_bits) for num_bits in (4, 8)}
    dense.WNA16_SUPPORTED_TYPES_MAP = dense.WNA16_ZP_SUPPORTED_TYPES_MAP = kinds
    for module in (dense, moe):
        module.marlin_make_workspace = lambda device, *_: torch.zeros(8, dtype=torch.int32)


def shuffled(packed: Tensor, perm: Tensor, size_k: int, size_n: int, num_bits: int) -> Tensor:
    assert packed.shape == (size_k * num_bits // 32, size_n) and not perm.numel()
    return packed.view(size_k // 16, -1, size_n).transpose(1, 2).flip(1).reshape(size_k // 16, size_n * num_bits // 2)


def served(rank: Any) -> tuple[dict[str, bytes], dict[str, int], str]:
    """Runs on a rank: everything a model holds in its layers, where it is, and why it refuses pushes."""
    held = rank.parameters()
    for name, module in rank.model.named_modules():
        held |= {f"{name}.{key}": value for key, value in vars(module).items() if isinstance(value, Tensor)}
    held = {name: tensor for name, tensor in held.items() if not is_description(name)}
    addresses = {name: tensor.data_ptr() for name, tensor in held.items()}
    return {name: bits(tensor).numpy().tobytes() for name, tensor in held.items()}, addresses, refusal(rank.model)


def differing(rank: Any, folder: Path) -> list[str]:
    """Runs on a rank: the findings of ``--check-weight-update-equal``."""
    compare_weights(rank.model, read_tensors(folder).items())
    return flatten_reports(rank.model.get_weights_by_name(CHECK_REPORT))


def converted(folder: Path, case: FamilyCase, recipe: ToQuantized) -> dict[str, Tensor]:
    """The tensors of a newly written quantized folder."""
    case.write_checkpoint(folder.parent / "plain")
    rewrite_folder(recipe, folder.parent / "plain", folder)
    return read_tensors(folder)


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", REPACKED)
def test_a_push_leaves_what_an_engine_has_that_starts_from_the_folder(
    model: LoadedModel, tmp_path: Path, name: str
) -> None:
    family, sizes, recipe = REPACKED[name]
    case = case_of(family, **SIZES, **sizes)
    folders = (tmp_path / "first", tmp_path / "second")
    first = converted(folders[0], case, recipe)
    second = {key: tensor if is_description(key) else tensor.flip(0).contiguous() for key, tensor in first.items()}
    folders[1].mkdir()
    save_file(second, folders[1] / "model.safetensors")
    shutil.copy(folders[0] / "config.json", folders[1])
    model.call(as_on_an_h100, "triton" if "Triton" in name else "auto")
    started = []
    for folder in folders:
        model.swap(folder, has_weights=True)
        started.append(model.call(served))
    assert [refused for _, _, refused in started[1]] == ["", ""]
    for number, (layout, goal) in enumerate([(whole_buckets, 0), (whole_buckets, 1), (cut_buckets, 0)]):
        sent = (first, second)[goal]
        assert push(model, layout(sent, 3), sent, f"p{number}")["problems"] == []
        assert model.call(differing, folders[goal]) == [[], []]
        model.commit_weight_update(f"p{number}", str(number))
        for got, wanted, here in zip(model.call(served), started[goal], started[1], strict=True):
            assert [key for key, value in wanted[0].items() if value != got[0][key]] == []
            assert got[1] == here[1], "CUDA graphs read the addresses that they were captured with"
    alike = {key for key, value in started[0][0][0].items() if value == started[1][0][0][key]}
    assert not [key for key in alike if "weight_packed" in key or key.endswith("weight")]


def spoil(rank: Any) -> None:
    """Runs on a rank: make its last layer impossible to repack."""
    vars(rank.model)["_slime_repacked_layers"][-1].problem = "it is another" if rank.tp_rank else ""


def test_an_engine_that_cannot_repack_refuses_the_push_and_says_why(model: LoadedModel, tmp_path: Path) -> None:
    family, sizes, recipe = REPACKED["rows"]
    tensors = converted(tmp_path / "first", case_of(family, **SIZES, **sizes), recipe)
    model.call(as_on_an_h100, "auto")
    model.swap(tmp_path / "first", has_weights=True)
    model.call(spoil)
    manifest = whole_buckets(tensors)
    with pytest.raises(WeightSyncError, match=r"rank 1: begin_weight_update: SGLang has repacked 1 layers.*another"):
        model.begin_weight_update(manifest.id, "refused", manifest.to_json())
