"""Quantization configs of published checkpoints, and those that cannot be served."""

import pytest
import torch

from slime.utils.errors import ConfigError
from slime.weights.quantize.config import IgnoredModules, read_format
from slime.weights.quantize.formats import BlockFp8, ChannelFp8, GroupInt, TensorFp8

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


def test_integer_scales_have_the_dtype_of_the_engine():
    assert read_format(compressed("pack-quantized", INT4), scale_dtype=torch.float16).scale_dtype == torch.float16


def test_blocks_have_powers_of_two_where_the_device_wants_them():
    assert read_format(DEEPSEEK_V3, ue8m0=True) == BlockFp8((128, 128), ue8m0=True)


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


def test_a_block_size_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"weight_block_size .* is \[128\]"):
        read_format({**DEEPSEEK_V3, "weight_block_size": [128]})


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
