"""MXFP4 of gpt-oss: every code and exponent as transformers reads them; one expert, a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from slime.backends.megatron_utils.hf_to_megatron.tensors import HfTensors
from slime.utils.errors import ConfigError, DataError
from slime.weights.quantize import read_format
from slime.weights.quantize.mxfp4 import dequantize

GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
CONFIG = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}


def packed(experts: int = 3, rows: int = 6, groups: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (experts, rows, groups, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(110, 140, (experts, rows, groups), dtype=torch.uint8, generator=generator)


def write_folder(source: Path) -> Path:
    source.mkdir()
    blocks, scales = packed()
    bias = torch.arange(18.0).view(3, 6).bfloat16()
    tensors = {f"{GATE_UP}_blocks": blocks, f"{GATE_UP}_scales": scales, f"{GATE_UP}_bias": bias}
    save_file({**tensors, "model.norm.weight": torch.ones(4).bfloat16()}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(CONFIG))
    return source


def test_all_codes_and_exponents_are_those_of_transformers() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    for exponent in range(20, 235):  # beyond, products leave bf16's normal numbers
        scales = torch.full((1, 1, 16), exponent, dtype=torch.uint8)
        assert torch.equal(dequantize("X", codes, scales), convert_moe_packed_tensors(codes, scales))
    assert torch.equal(dequantize("X", *packed()), convert_moe_packed_tensors(*packed()))


def test_a_folder_gives_tensors_and_single_experts_as_if_it_were_bf16(tmp_path: Path) -> None:
    expected = convert_moe_packed_tensors(*packed())
    with HfTensors(write_folder(tmp_path / "mxfp4")) as tensors:
        assert set(tensors.names()) == {GATE_UP, f"{GATE_UP}_bias", "model.norm.weight"}
        assert torch.equal(tensors.get(GATE_UP), expected)
        for expert in range(3):
            assert torch.equal(tensors.get(f"{GATE_UP}[{expert}]"), expected[expert])
            assert tensors.get(f"{GATE_UP}_bias[{expert}]").tolist() == [6.0 * expert + i for i in range(6)]
        assert tensors.read == {GATE_UP, f"{GATE_UP}_bias"}
        with pytest.raises(DataError, match="down_proj"):
            tensors.get("model.layers.0.mlp.experts.down_proj[0]")


def test_pushes_in_mxfp4_are_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"tools/convert_mxfp4_to_bf16\.py"):
        read_format({"quant_method": "mxfp4"})
