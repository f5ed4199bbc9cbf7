"""Converters quantize exactly what SGLang's own models hold quantized: every FP8 tensor meets an FP8 parameter.

An extra quantized tensor would be cast into a parameter without a scale, and a missing one would leave a scale
unwritten; either serves nonsense without an error.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from slime.backends.megatron_utils.models import find_weight_map
from slime.weights.quantize import Quantizer, read_format
from slime.weights.quantize.block_fp8 import FP8
from slime.weights.quantize.formats import is_quantized_offline, modules_to_not_convert
from tests.loaded_model.buckets import whole_buckets
from tests.loaded_model.engine import LoadedModel
from tests.loaded_model.rank import BLOCK_FP8
from tests.matrix.case import load_cases, read_tensors

pytestmark = pytest.mark.timeout(1800)

BLOCK = 4
"""Side of the blocks: it divides all sizes here, as 128 divides those of real models."""
ALL_SPARSE = {"mlp_only_layers": [], "decoder_sparse_step": 1}
"""SGLang's Qwen models of experts have no dense layers."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2.5": {},
    "qwen3": {},
    "qwen3_moe": ALL_SPARSE,
    "qwen2_moe": ALL_SPARSE,
    "glm4": {},
    "glm4_moe": {},
    "deepseek_v3": {},
    "kimi_k2": {},
    "minimax_m2": {},
}


def quantized(folder: Path, family: str, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The family's checkpoint in ``folder``; its tensors as converters quantize them, and the config for them."""
    case = load_cases([family])[family]
    dataclasses.replace(case, config={**case.config, **settings}).write_checkpoint(folder)
    plain, kept = read_tensors(folder), find_weight_map(case.config["model_type"]).plain
    config = {
        **BLOCK_FP8,
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": modules_to_not_convert(plain, kept),
    }
    names = [name for name, tensor in plain.items() if is_quantized_offline(name, tensor.shape, kept)]
    weight_format = read_format(config)
    assert weight_format is not None
    quantizer = Quantizer(weight_format, names)
    stored = {
        part: value
        for name, tensor in plain.items()
        for part, value in quantizer.quantize(name, tensor if "correction_bias" in name else tensor.bfloat16())
    }
    return stored, config


def misfits(rank: Any, tensors: dict[str, Tensor]) -> tuple[list[str], list[str], list[str]]:
    """Runs beside the model: tensors without a matching parameter, unused tensors, unwritten parameters."""
    from slime.ext.fast_push.load_plan import LoadPlan

    plan = LoadPlan(rank.model, whole_buckets(tensors, 3))
    assert plan.is_traced
    problems = list(plan.problems)
    for name, writes in plan.writes.items():
        for write in writes:
            if (tensors[name].dtype == FP8) != (write.target.dtype == FP8):
                problems.append(f"{name} is {tensors[name].dtype}; the engine holds {write.target.dtype}")
    return problems, sorted(plan.unused), sorted(plan.unwritten)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_meets_a_parameter_of_its_kind(model: LoadedModel, tmp_path: Path, family: str) -> None:
    tensors, config = quantized(tmp_path, family, FAMILIES[family])
    model.swap(tmp_path, quantization=config)
    ((problems, unused, unwritten),) = model.call(misfits, tensors)
    assert problems == []
    assert unwritten == []
    # The MTP layer belongs to another model, the draft's.
    last = load_cases([family])[family].config["num_hidden_layers"]
    assert [name for name in unused if not name.startswith(f"model.layers.{last}.")] == []


def test_sglangs_llama_drops_the_scales_of_blocks_which_the_plan_tells(model: LoadedModel, tmp_path: Path) -> None:
    """Llama's loader renames them, so no push of FP8 blocks into a Llama can be complete."""
    tensors, config = quantized(tmp_path, "llama3-plain", {})
    model.swap(tmp_path, quantization=config)
    ((_, unused, unwritten),) = model.call(misfits, tensors)
    assert unused == sorted(name for name in tensors if name.endswith("_scale_inv"))
    assert unwritten
    assert all(name.endswith("_scale_inv") for name in unwritten)
