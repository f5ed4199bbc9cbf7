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
from slime.weights.quantize import Quantizer, read_format
from slime.weights.quantize.formats import PackedFp4, read_weight
from slime.weights.quantize.mxfp4 import dequantize, multiply_out, quantize_rows

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
    for exponent in range(20, 235):  # outside, products leave bf16's normal range
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


def test_rows_are_rounded_to_the_nearest_number_and_ties_to_an_even_code() -> None:
    """Scales 1 (the largest is 6) and 2 (slightly more than 6); midpoints of all neighbors."""
    halves = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    row = torch.tensor([*halves, *(-x for x in halves), -0.0, 6.0] + [0.0] * 16)
    packed, scale = quantize_rows(torch.stack([row, 2 * row.clamp(max=3.25)]))
    rounded = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert scale.float().tolist() == [[1.0], [2.0]]
    assert packed.dtype == torch.int8 and scale.dtype == torch.float8_e8m0fnu
    values = multiply_out(packed, scale).float()
    assert values[0].tolist() == [*rounded, *(-x for x in rounded), 0.0, 6.0] + [0.0] * 16
    assert (
        values[1].tolist() == [2 * x for x in [*rounded[:5], 3.0, 3.0, *(-x for x in rounded), 0.0, 3.0]] + [0.0] * 16
    )
    assert bool(torch.signbit(values[0, 14])) and not torch.signbit(values[0, 16])


def test_shapes_are_kept_without_rows_and_refused_without_whole_groups() -> None:
    for rows, columns in ((0, 64), (3, 0)):
        parts = PackedFp4().quantize("e.weight", torch.zeros(rows, columns), check_finite=True)
        outputs = PackedFp4().outputs("e.weight", (rows, columns))
        assert {part: (tuple(tensor.shape), tensor.dtype) for part, tensor in parts.items()} == outputs
    with pytest.raises(ConfigError, match=r"e\.weight has 40 columns; FP4 needs a multiple of 32"):
        Quantizer(PackedFp4(), {"e.weight"}).quantize("e.weight", torch.zeros(4, 40))


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        (torch.ones(4, 16, dtype=torch.int8), torch.ones(4, 1)),
        (torch.ones(4, 16, dtype=torch.uint8), torch.full((4, 1), 127, dtype=torch.uint8)),
    ],
)
def test_integers_are_numbers_of_four_bits_by_the_dtype_of_their_scale(weight: Tensor, scale: Tensor) -> None:
    stored = {"e.weight": weight, "e.scale": scale}
    with pytest.raises(DataError, match=f"{weight.dtype} with scales in {scale.dtype}; .*torch.float8_e8m0fnu"):
        read_weight("e.weight", stored.__getitem__, stored, None)
    stored["e.scale"] = torch.ones(4, 1).to(torch.float8_e8m0fnu)
    assert read_weight("e.weight", stored.__getitem__, stored, None).shape == (4, 32)


def test_what_packed_rows_stand_for_is_not_rounded_again() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[3, 32:64] = 0
    packed, scale = quantize_rows(weight)
    once = multiply_out(packed, scale)
    assert torch.equal(multiply_out(*quantize_rows(once)), once)
    assert scale[3, 1].float() == 2.0**-126, "the scale of zeros, the least that fp32 holds as a normal number"
    assert bool(torch.isfinite(once.float()).all()) and not once[3, 32:64].any()
