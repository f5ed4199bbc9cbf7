"""Weights for quantized checkpoints: every family, every format, and refusals."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from slime.backends.megatron_utils import sglang
from slime.backends.megatron_utils.megatron_to_hf import checkpoint_quantizer, convert_to_hf
from slime.backends.megatron_utils.models import all_families
from slime.backends.megatron_utils.models.rule import WeightMap
from slime.utils.errors import ConfigError
from slime.weights.quantize.block_fp8 import is_power_of_two, quantize_block
from slime.weights.quantize.formats import is_quantized_offline

QUANTIZED_PARAMETERS = re.compile(
    r"mlp\.(experts|shared_experts)\.linear_fc[12]\.weight(\{expert\})?"
    r"|mlp\.linear_fc[12]\.weight"
    r"|self_attention\.linear_(proj|qkv|[qkv]|q_proj|q_down_proj|q_up_proj|kv_down_proj|kv_up_proj)\.weight"
    r"|self_attention\.(in_proj|out_proj|(indexer\.)?wq_b|wk|linear_kv_proj)\.weight"
)
"""A layer's Megatron parameters whose HF tensors engines hold in FP8."""

PLAIN_PARTS = (*(f"linear_attn.in_proj_{part}.weight" for part in ("ba", "b", "a")), "mixer.in_proj.weight")
"""The parts of such parameters without a quantized form: a few rows that form or end a tensor on disk."""

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
Q, K, V = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv")
QKV = "module.module.decoder.layers.0.self_attention.linear_qkv.weight"


# Every family


@pytest.mark.parametrize(
    "weight_map", {f.weight_map.family: f.weight_map for f in all_families().values()}.values(), ids=lambda m: m.family
)
def test_converters_quantize_what_comes_from_the_matrices_of_the_layers(weight_map: WeightMap) -> None:
    """Converters select weights by HF names, models by Megatron parameters; both rules must agree."""
    mtp = weight_map.mtp_prefix(0, SimpleNamespace(num_layers=7)) if weight_map.mtp else ""
    for prefix, rules in (("", weight_map.top), ("model.layers.7.", weight_map.layer), (mtp, weight_map.mtp)):
        for rule in rules:
            expected = bool(prefix and QUANTIZED_PARAMETERS.fullmatch(rule.megatron))
            for name in rule.hf:
                is_quantized = is_quantized_offline(prefix + name.replace("{expert}", "3"), plain=weight_map.plain)
                has_form = name not in PLAIN_PARTS and not name.endswith("[{expert}]")
                assert is_quantized == (expected and has_form), (rule.megatron, name)
    for copy in weight_map.mtp_copies.values():
        assert not is_quantized_offline(f"model.layers.7.{copy}", plain=weight_map.plain)


# One parameter


def checkpoint(folder: Path, config: dict[str, object] | None = None) -> Namespace:
    """A checkpoint of one file with one quantized layer, and the args of a model of that shape."""
    quantized, scale = quantize_block(torch.ones(8, 8))
    tensors = {name: quantized for name in (Q, K, V)} | {f"{name}_scale_inv": scale for name in (Q, K, V)}
    folder.mkdir(exist_ok=True)
    save_file(
        {name: t.clone() for name, t in tensors.items()} | {"model.norm.weight": torch.ones(8)},
        folder / "a.safetensors",
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "quantization_config": config or BLOCKS}))
    return Namespace(
        **{"hf_checkpoint": str(folder), "vocab_size": 8, "hidden_size": 8, "num_attention_heads": 2, "num_layers": 1},
        **{"kv_channels": 4, "group_query_attention": False, "num_query_groups": 1, "mtp_num_layers": None},
        **{"untie_embeddings_and_output_weights": True, "padded_vocab_size": 8, "num_experts": None},
    )


def convert(args: Namespace, name: str, param: torch.Tensor, config: dict[str, object], **more: bool):
    return convert_to_hf(args, "qwen3", name, param, config, **more)


def test_a_parameter_is_split_and_each_of_its_tensors_quantized(tmp_path: Path) -> None:
    args = checkpoint(tmp_path)
    qkv = torch.randn(24, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    plain = convert_to_hf(args, "qwen3", QKV, qkv)
    result = convert(args, QKV, qkv, BLOCKS)
    assert [name for name, _ in plain] == [Q, K, V]
    assert [name for name, _ in result] == [n for name in (Q, K, V) for n in (name, f"{name}_scale_inv")]
    for index, (_, tensor) in enumerate(plain):
        quantized, scale = quantize_block(tensor)
        assert torch.equal(result[2 * index][1].view(torch.uint8), quantized.view(torch.uint8))
        assert torch.equal(result[2 * index + 1][1], scale)
    ((name, norm),) = convert(args, "decoder.final_layernorm.weight", torch.ones(8), BLOCKS)
    assert name == "model.norm.weight"
    assert norm.dtype == torch.float32


def test_the_cast_to_the_dtype_that_travels_comes_before_the_quantization(tmp_path: Path) -> None:
    """Quantizing fp32 and quantizing its bf16 rounding differ; pushes and converted folders quantize the latter."""
    args = checkpoint(tmp_path)
    exact = torch.full((24, 8), 1.0)
    exact[0, 0] = 1.0 + 2.0**-9
    from_fp32 = dict(convert(args, QKV, exact, BLOCKS))
    from_bf16 = dict(convert(args, QKV, exact.to(torch.bfloat16), BLOCKS))
    assert from_fp32[f"{Q}_scale_inv"] > from_bf16[f"{Q}_scale_inv"]


def test_a_model_with_layers_that_the_quantized_checkpoint_lacks_is_refused(tmp_path: Path) -> None:
    args = checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="no tensor model.layers.1.self_attn.q_proj.weight"):
        convert(args, QKV.replace("layers.0", "layers.1"), torch.ones(24, 8), BLOCKS)


def test_scales_are_laid_out_for_deep_gemm_only_where_engines_want_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = checkpoint(tmp_path)
    args.hidden_size, args.kv_channels = 256, 64
    qkv = torch.randn(384, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert dict(convert(args, QKV, qkv, dict(BLOCKS)))[f"{Q}_scale_inv"].shape == (1, 2)
    monkeypatch.setattr(sglang, "wants_ue8m0_scales", lambda block: block == (128, 128))
    config = dict(BLOCKS)
    packed = dict(convert(args, QKV, qkv, config))
    stored = dict(convert(args, QKV, qkv, config, transform_ue8m0=False))
    assert packed[f"{Q}_scale_inv"].dtype == torch.int32
    assert packed[f"{Q}_scale_inv"].shape == (128, 1)
    scale = stored[f"{Q}_scale_inv"]
    assert is_power_of_two(scale).all()
    exponents = packed[f"{Q}_scale_inv"].flatten().view(torch.uint8)[:4].float() - 127
    assert torch.equal(torch.exp2(exponents[:2]), scale[0])
    assert torch.equal(packed[Q].view(torch.uint8), stored[Q].view(torch.uint8))


# Invalid checkpoints


def test_a_checkpoint_elsewhere_cannot_say_what_is_quantized(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a folder with safetensors.*download"):
        checkpoint_quantizer("Qwen/Qwen3-4B-FP8", BLOCKS)
    assert checkpoint_quantizer("Qwen/Qwen3-4B", None) is None


def test_files_in_another_format_than_the_config_says_are_refused(tmp_path: Path) -> None:
    config = {key: value for key, value in BLOCKS.items() if key != "weight_block_size"}
    checkpoint(tmp_path, config)
    with pytest.raises(ConfigError, match=r"none of its 7 tensors is quantized .called \*.weight_scale."):
        checkpoint_quantizer(tmp_path, config)
