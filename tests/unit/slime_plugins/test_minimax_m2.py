"""MiniMax-M2: from the model file to layers in full size, the norm over all heads, and refusals.

The matrix checks log-probs and gradients against transformers, in all layouts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from benchmarks.published_configs import MINIMAX_M2
from slime.backends.megatron_utils.flags.config_builders import transformer_config_from_args
from slime.backends.megatron_utils.flags.hf_config_check import check_engine_keys
from slime.backends.megatron_utils.model_provider import get_model_provider
from slime.utils.errors import ConfigError
from slime.weights.quantize import Quantizer, read_quantization
from slime.weights.quantize.formats import is_quantized_offline
from slime_plugins.models.minimax_m2.layers import AllHeadsNorm
from tests.matrix.families.minimax_m2 import CASE
from tests.unit.backends.megatron_utils.megatron_case import parse, start_single_process
from tests.unit.scripts.test_model_files import model_args


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("minimax_m2")
    CASE.write_checkpoint(folder)
    return folder


def test_the_model_file_makes_minimax_m2_in_its_full_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MINIMAX_M2))
    args = parse("--hf-checkpoint", str(tmp_path), *model_args("minimax-m2"), "--no-initialization")
    start_single_process(args)
    with FakeTensorMode():
        model = get_model_provider(args)()
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e9, 1) == 228.7
    attention = model.decoder.layers[61].self_attention
    assert attention.q_layernorm.weight.shape == (48 * 128,) and attention.k_layernorm.weight.shape == (8 * 128,)


@pytest.mark.parametrize(
    ("zero_centered", "dtype"), [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)]
)
def test_the_mean_square_is_that_of_all_heads_of_a_token(
    tiny_folder: Path, zero_centered: bool, dtype: torch.dtype
) -> None:
    args = parse("--hf-checkpoint", tiny_folder, *CASE.flags(tiny_folder))
    args.apply_layernorm_1p = zero_centered
    start_single_process(args)
    norm = AllHeadsNorm(transformer_config_from_args(args), 4, 1e-6, num_heads=3)
    x, weight = torch.randn(5, 1, 3, 4).to(dtype), torch.rand(12)
    norm.weight.data.copy_(weight - 1.0 if zero_centered else weight)
    token = x[3, 0].double().flatten()
    expected = token / (token.square().mean() + 1e-6).sqrt() * weight
    assert norm(x).dtype == dtype
    torch.testing.assert_close(
        norm(x)[3, 0].double().flatten(), expected, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=0
    )


@pytest.mark.parametrize(
    ("remove", "add", "message"),
    [
        ("--qk-layernorm", [], "--qk-layernorm is not given; MiniMax-M2 norms queries and keys"),
        (None, ["--normalization", "LayerNorm"], "--normalization is LayerNorm; MiniMax-M2 has RMSNorm"),
        (None, ["--mtp-num-layers", "1"], "known neither here nor to SGLang; drop the flag"),
    ],
)
def test_flags_of_another_model_are_refused(remove: str | None, add: list[str], message: str) -> None:
    flags = [flag for flag in model_args("minimax-m2") if flag != remove]
    with pytest.raises(ConfigError, match=message):
        parse(*flags, *add)


@pytest.mark.parametrize("key", ["use_qk_norm", "use_routing_bias", "rotary_dim", "scoring_func"])
def test_a_config_of_which_an_engine_would_build_another_model_is_refused(key: str) -> None:
    check_engine_keys(MINIMAX_M2)
    check_engine_keys({"model_type": "qwen3"})
    without = {name: value for name, value in MINIMAX_M2.items() if name != key}
    with pytest.raises(ConfigError, match=f"{key} \\(without it.*published config.json"):
        check_engine_keys(without)


def test_the_published_list_of_plain_modules_agrees_with_what_is_quantized() -> None:
    layer = "model.layers.0."
    quantized = [
        *(f"{layer}self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"{layer}block_sparse_moe.experts.7.w{number}.weight" for number in (1, 2, 3)),
    ]
    plain = [
        f"{layer}block_sparse_moe.gate.weight",
        f"{layer}block_sparse_moe.e_score_correction_bias",
        f"{layer}self_attn.q_norm.weight",
        f"{layer}input_layernorm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ]
    assert all(map(is_quantized_offline, quantized)) and not any(map(is_quantized_offline, plain))
    published = {
        **{"quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic"},
        **{"weight_block_size": [128, 128], "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
    }
    config = read_quantization(published)
    assert config is not None
    config.check_names(quantized)
    quantizer = Quantizer(config.format, quantized, known_names=[*quantized, *plain])
    assert [quantizer.is_quantized(name) for name in (*quantized, *plain)] == [True] * 7 + [False] * 6
