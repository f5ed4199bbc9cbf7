"""The quantizer, and what a quantization_config selects and excludes."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from slime.utils.errors import ConfigError, DataError
from slime.weights.quantize import Quantizer, as_stored, quantized_names, read_format, read_quantization
from slime.weights.quantize.formats import (
    BlockFp8,
    ChannelFp8,
    GroupInt,
    PackedFp4,
    TensorFp8,
    TwoFormats,
    logical_names,
    read_weight,
)
from slime.weights.quantize.quantizer import IgnoredModules
from slime.weights.stored_tensors import TensorInfo

DEEPSEEK_V3 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
DYNAMIC_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def compressed(kind, weights, activations=None, **more):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}, **more}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
FP8_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}


@pytest.mark.parametrize(("config", "expected"), [
    (None, None),
    ({}, None),
    (DEEPSEEK_V3, BlockFp8((128, 128))),
    ({**DEEPSEEK_V3, "scale_fmt": "ue8m0"}, BlockFp8((128, 128), ue8m0=True)),
    ({**DEEPSEEK_V3, "fmt": "float8_e4m3fn"}, BlockFp8((128, 128))),
    ({"quant_method": "fp8", "activation_scheme": "dynamic"}, TensorFp8()),
    (compressed("pack-quantized", INT4), GroupInt(4, 32, True)),
    (compressed("pack-quantized", {**INT4, "num_bits": 8, "symmetric": False}), GroupInt(8, 32, False)),
    (compressed("pack-quantized", {**INT4, "strategy": "channel", "group_size": None}), GroupInt(4, None, True)),
    (compressed("float-quantized", FP8_CHANNEL, DYNAMIC_TOKENS), ChannelFp8()),
    (compressed("float-quantized", {**FP8_CHANNEL, "strategy": "tensor"}, DYNAMIC_TOKENS), TensorFp8()),
    (
        compressed("float-quantized", {**FP8_CHANNEL, "strategy": "block", "block_structure": [128, 128]}),
        BlockFp8((128, 128), marker="weight_scale"),
    ),
])  # fmt: skip
def test_each_published_kind_has_its_format(config, expected):
    assert read_format(config) == expected


def test_only_fp8_blocks_can_be_made_of_slices():
    assert Quantizer(BlockFp8((128, 64)), ["w.weight"]).block == (128, 64)
    assert Quantizer(ChannelFp8(), ["w.weight"]).block is None


@pytest.mark.parametrize(("config", "what"), [
    ({"quant_method": "gptq", "bits": 4}, "gptq"),
    ({"quant_method": "awq"}, "awq"),
    ({"quant_method": "mxfp8"}, "mxfp8"),
    ({"quant_method": "modelopt"}, "modelopt"),
    ({"bits": 4}, "None"),
    ({**DEEPSEEK_V3, "activation_scheme": "static"}, "activation_scheme static"),
    ({**DEEPSEEK_V3, "fmt": "e5m2"}, "fmt e5m2"),
    ({**DEEPSEEK_V3, "fmt": "float8_e4m3fnuz"}, "fmt float8_e4m3fnuz"),
    ({**DEEPSEEK_V3, "scale_fmt": "e5m3"}, "scale_fmt e5m3"),
    (compressed("pack-quantized", {**INT4, "num_bits": 2}), "2-bit int weights by group"),
    (compressed("pack-quantized", {**INT4, "actorder": "group"}), "actorder"),
    (compressed("pack-quantized", INT4, DYNAMIC_TOKENS), "activations"),
    (compressed("int-quantized", {**INT4, "num_bits": 8, "strategy": "channel"}), "int-quantized"),
    (compressed("nvfp4-pack-quantized", {**INT4, "type": "float"}), "nvfp4-pack-quantized"),
    (compressed("float-quantized", FP8_CHANNEL, {**DYNAMIC_TOKENS, "dynamic": False}), "not dynamic"),
    (compressed("pack-quantized", INT4, linear_fp8_config=DEEPSEEK_V3), "linear_fp8_config"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "0 different kinds"),
    ({
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"a": {"weights": INT4}, "b": {"weights": {**INT4, "num_bits": 8}}},
    }, "2 different kinds"),
])  # fmt: skip
def test_what_cannot_be_made_is_refused_by_name_with_what_can(config, what):
    with pytest.raises(ConfigError, match=rf"quantized \(.*{what}.*pack-quantized int4.*--hf-checkpoint"):
        read_format(config)


def test_an_fp8_list_holds_parts_of_paths():
    ignored = IgnoredModules(
        {"quant_method": "fp8", "modules_to_not_convert": ["mlp.gate", "model.layers.3", "lm_head"]}
    )
    assert ignored.find("model.layers.1.mlp.gate") == "mlp.gate"
    assert ignored.find("model.layers.1.mlp.gate_proj") is None
    assert ignored.find("model.layers.3.mlp.up_proj") == "layers.3"
    assert ignored.find("model.layers.30.mlp.up_proj") is None
    assert ignored.find("lm_head") == "lm_head"


def test_a_compressed_tensors_list_holds_names_and_expressions():
    ignored = IgnoredModules({"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*mlp.gate$"]})
    assert ignored.find("model.layers.1.mlp.gate") == "re:.*mlp.gate$"
    assert ignored.find("model.layers.1.mlp.gate_proj") is None
    assert ignored.find("model.lm_head") is None
    assert ignored.find("lm_head") == "lm_head"


UP, GATE, NORM = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate.weight", "model.norm.weight"
CONFIGS = {
    "block": DEEPSEEK_V3,
    "block ue8m0": {**DEEPSEEK_V3, "scale_fmt": "ue8m0"},
    "small blocks": {**DEEPSEEK_V3, "weight_block_size": [32, 64]},
    "tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "channel": compressed("float-quantized", FP8_CHANNEL, DYNAMIC_TOKENS),
    "int4": compressed("pack-quantized", INT4),
    "int4 asymmetric": compressed("pack-quantized", {**INT4, "symmetric": False}),
    "int8 rows": compressed("pack-quantized", {**INT4, "num_bits": 8, "strategy": "channel", "group_size": None}),
}


def codes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: TensorInfo.of(name, tensor.dtype, tensor.shape).dtype for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_told_beforehand_is_what_is_made(name):
    quantizer = Quantizer(read_format(CONFIGS[name]), {UP})
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((1, 32), (128, 128), (129, 160), (200, 96), (7, 320)):
        weight = torch.randn(rows, columns, generator=generator).to(torch.bfloat16)
        made = quantizer.quantize(UP, weight)
        assert [(n, tuple(t.shape), t.dtype) for n, t in made] == quantizer.outputs(UP, (rows, columns))
        assert all(t.is_contiguous() for _, t in made)
        # Read back as a checkpoint would be.
        stored = dict(made)
        assert logical_names(codes(stored)) == [UP]
        restored = read_weight(UP, stored.__getitem__, stored, read_format(CONFIGS[name]))
        assert restored.shape == weight.shape
        assert (restored - weight).abs().max() <= (0.5 if "int4" in name else 0.25)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoints_names_say_what_is_quantized(name):
    quantizer = Quantizer(read_format(CONFIGS[name]), {UP})
    stored = codes(dict(quantizer.quantize(UP, torch.ones(32, 32)))) | {GATE: "BF16", NORM: "BF16"}
    assert quantized_names(stored, read_format(CONFIGS[name])) == {UP}
    assert set(logical_names(stored)) == {UP, GATE, NORM}


def test_a_weight_that_the_checkpoint_does_not_have_is_refused():
    quantizer = Quantizer(read_format(DEEPSEEK_V3), {UP}, known_names={UP, GATE})
    assert not quantizer.is_quantized(GATE)
    assert not quantizer.is_quantized("model.layers.0.self_attn.q_proj.bias")
    with pytest.raises(ConfigError, match="no tensor model.layers.1.mlp.up_proj.weight.*--mtp-num-layers"):
        quantizer.is_quantized("model.layers.1.mlp.up_proj.weight")


def test_a_config_that_claims_what_the_names_do_not_show_is_refused():
    with pytest.raises(ConfigError, match=r"none of its 2 tensors is quantized .called \*.weight_scale_inv."):
        quantized_names({UP: "BF16", NORM: "BF16"}, read_format(DEEPSEEK_V3))


@pytest.mark.parametrize(("config", "entry"), [
    ({**DEEPSEEK_V3, "modules_to_not_convert": ["mlp.up_proj"]}, "mlp.up_proj"),
    ({**DEEPSEEK_V3, "ignored_layers": ["model.layers.0.mlp.up_proj"]}, "layers.0.mlp.up_proj"),
    (compressed("pack-quantized", INT4, ignore=["re:.*up_proj"]), "re:.*up_proj"),
])  # fmt: skip
def test_a_list_of_exceptions_with_a_quantized_module_is_refused(config, entry):
    with pytest.raises(ConfigError) as caught:
        read_quantization(config).check_names({UP})
    assert f"has {UP} quantized" in str(caught.value)
    assert f"lists {entry!r}" in str(caught.value)


def test_matrices_that_are_neither_quantized_nor_listed_are_warned_of(caplog):
    down = "model.layers.0.mlp.down_proj.weight"
    with caplog.at_level(logging.WARNING):
        config = read_quantization(DEEPSEEK_V3)
        assert config.warn_of_unlisted_weights({UP, GATE, NORM, down}, {UP}) == [down]
        assert "down_proj" in caplog.text
        listed = read_quantization({**DEEPSEEK_V3, "modules_to_not_convert": ["down_proj"]})
        assert listed.warn_of_unlisted_weights({UP, GATE, NORM, down}, {UP}) == []


def test_finite_weights_can_be_insisted_on():
    weight = torch.full((4, 4), float("inf"))
    Quantizer(read_format(DEEPSEEK_V3), {UP}).quantize(UP, weight)
    with pytest.raises(DataError, match="layers.0.mlp.up_proj.weight has NaN or infinite"):
        read_format(DEEPSEEK_V3).quantize(UP, weight, check_finite=True)


# Reading back


def test_eight_bit_floats_without_a_scale_are_refused():
    stored = {"w": torch.ones(2, 2).to(torch.float8_e4m3fn)}
    with pytest.raises(DataError, match="without a scale .called w_scale_inv."):
        read_weight("w", stored.__getitem__, stored, None)


def test_packed_weights_need_their_config_and_all_parts():
    stored = dict(Quantizer(read_format(CONFIGS["int4"]), {UP}).quantize(UP, torch.ones(8, 32)))
    with pytest.raises(DataError, match="does not say how"):
        read_weight(UP, stored.__getitem__, stored, None)
    del stored["model.layers.0.mlp.up_proj.weight_shape"]
    with pytest.raises(DataError, match="up_proj.weight_shape is missing"):
        read_weight(UP, stored.__getitem__, stored, read_format(CONFIGS["int4"]))


def test_files_show_four_bits_beside_eight_and_scales_of_one_byte() -> None:
    stored = {"a.weight": "F8_E4M3", "a.scale": "F8_E8M0", "e.weight": "I8", "e.scale": "F8_E8M0", "b.weight": "BF16"}
    found = as_stored(BlockFp8((128, 128)), stored)
    assert isinstance(found, TwoFormats) and found.names == {"e.weight"} and found.other == PackedFp4()
    assert quantized_names(stored, found) == {"a.weight", "e.weight"}
    assert logical_names(stored) == ["a.weight", "e.weight", "b.weight"]
    weight = torch.randn(130, 256).bfloat16()
    for name, sizes in (("a.weight", [(130, 256), (2, 2)]), ("e.weight", [(130, 128), (130, 8)])):
        parts = found.quantize(name, weight, check_finite=True)
        outputs = found.outputs(name, (130, 256))
        assert [(tuple(part.shape), part.dtype) for part in parts.values()] == list(outputs.values())
        assert [shape for shape, _ in outputs.values()] == sizes
        files = {f"{name[0]}.{part}": tensor for part, tensor in parts.items()}
        assert torch.equal(
            read_weight(name, files.__getitem__, files, BlockFp8((128, 128))), found.dequantize(name, parts)
        )
    assert Quantizer(found, {"a.weight"}).block is None, "slices would have scales of four bytes"
    with pytest.raises(ConfigError, match=r"e\.weight has 40 columns; FP4 needs a multiple of 32"):
        found.outputs("e.weight", (8, 40))


def test_a_scale_that_belongs_to_no_weight_is_a_tensor() -> None:
    """Gemma 4's router has a factor, ``router.scale``, beside ``router.proj.weight``."""
    stored = {"router.scale": "BF16", "router.proj.weight": "BF16", "a.weight": "F8_E4M3", "a.weight_scale_inv": "F32"}
    assert logical_names(stored) == ["router.scale", "router.proj.weight", "a.weight"]
    assert as_stored(BlockFp8((128, 128)), stored) == BlockFp8((128, 128))


def test_a_scale_belongs_to_a_weight_of_few_bits_alone() -> None:
    quantized = {"a.weight": "F8_E4M3", "a.scale": "F8_E8M0", "e.weight": "U8", "e.scale": "F8_E8M0"}
    plain = {"n.weight": "BF16", "n.scale": "BF16", "i.weight": "U8", "i.scale": "U8", "alone.scale": "F8_E8M0"}
    assert logical_names(quantized | plain) == ["a.weight", "e.weight", *plain]
    found = as_stored(BlockFp8((128, 128)), quantized | plain)
    assert quantized_names(quantized | plain, found) == {"a.weight", "e.weight"}
    assert as_stored(BlockFp8((128, 128)), plain) == BlockFp8((128, 128)), "no weight has these exponents"


@pytest.mark.parametrize("other", [{"b.weight_scale_inv": "F32"}, {"b.scale": "F32"}])
def test_scales_of_two_kinds_in_one_checkpoint_are_refused(other: dict[str, str]) -> None:
    stored = {"a.weight": "F8_E4M3", "a.scale": "F8_E8M0", "b.weight": "F8_E4M3", **other}
    name = next(iter(other)).replace(".", r"\.")
    with pytest.raises(ConfigError, match=rf"1 scales in F8_E8M0, such as a\.scale, and 1 .*{name} in F32"):
        as_stored(BlockFp8((128, 128)), stored)
