"""Model flags against config.json: rounding is not a difference; experts are counted by the key the model reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from slime.backends.megatron_utils.flags.hf_config_check import config_says, read_hf_config
from slime.backends.megatron_utils.models import all_families
from slime.backends.megatron_utils.models.family import differs
from slime.utils.errors import ConfigError
from tests.matrix.case import load_cases, read_config
from tests.unit.backends.megatron_utils.megatron_case import parse

DENSE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 100 --swiglu".split()
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.00000001,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.000000001,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("one", "other", "is_different"),
    [
        (1e-05, 9.999999747378752e-06, False),
        (2.5, 2.5000002, False),
        (1_000_000, 1e6, False),
        (1e-05, 1.001e-05, True),
        (1e-06, 1e-05, True),
        (0.0, 1e-9, True),
        (4, 5, True),
        ("softmax", "sigmoid", True),
        ("softmax", "softmax", False),
    ],
)
def test_floats_differ_by_more_than_rounding(one: Any, other: Any, is_different: bool) -> None:
    assert differs(one, other) is is_different
    assert differs(other, one) is is_different


@pytest.mark.parametrize(
    ("config", "flags", "refusal"),
    [
        ({"rms_norm_eps": 9.999999747378752e-06}, "--norm-epsilon 1e-05", "--norm-epsilon is 1e-06"),
        ({"rope_theta": 1000000.01}, "--rotary-base 1000000", "--rotary-base is"),
        ({"partial_rotary_factor": 0.25000001}, "--rotary-percent 0.25", "--rotary-percent is"),
        ({"rope_parameters": LLAMA3}, "--use-rope-scaling --rope-scaling-factor 8", "--rope-scaling-factor is"),
    ],
)
def test_a_float_of_config_json_may_be_rounded(
    tmp_path: Path, config: dict[str, Any], flags: str, refusal: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "acme", **config}))
    checkpoint = ("--hf-checkpoint", str(tmp_path))
    parse(*DENSE, *flags.split(), *checkpoint)
    other = flags.replace("1e-05", "1e-06").replace("1000000", "10000").replace("0.25", "0.5").replace(" 8", " 9")
    with pytest.raises(ConfigError, match=refusal):
        parse(*DENSE, *other.split(), *checkpoint)


@pytest.mark.parametrize(
    ("family", "own", "unread"),
    [
        ("glm5", "n_routed_experts", ("num_experts",)),
        ("deepseek_v3", "n_routed_experts", ("num_experts", "num_local_experts")),
        ("qwen3_moe", "num_experts", ("n_routed_experts", "num_local_experts")),
        ("minimax_m2", "num_local_experts", ("num_experts",)),
    ],
)
def test_experts_are_counted_by_the_key_that_the_model_reads(
    tmp_path: Path, family: str, own: str, unread: tuple[str, ...]
) -> None:
    case = load_cases([family])[family]
    case.write_checkpoint(tmp_path)
    config = read_config(tmp_path)
    count = case.config[own]
    flags = [str(flag) for flag in case.flags(tmp_path)]
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config, own: count, **dict.fromkeys(unread, count + 250)}))
    parse(*flags, "--hf-checkpoint", str(tmp_path))
    file.write_text(json.dumps({**config, own: count + 1, **dict.fromkeys(unread, count)}))
    with pytest.raises(ConfigError, match=f"--num-experts is {count}; {own} is {count + 1}"):
        parse(*flags, "--hf-checkpoint", str(tmp_path))


COMPOSITES = [
    kind
    for kind, family in all_families().items()
    if family.weight_map.layer_prefix.startswith("model.language_model.")
]


def write_folder(folder: Path, config: Mapping[str, Any]) -> str:
    """Write a folder with this config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("kind", COMPOSITES)
@pytest.mark.parametrize("top", [True, False, None])
def test_the_top_of_config_json_decides_what_concerns_the_whole_folder(
    tmp_path: Path, kind: str, top: bool | None
) -> None:
    config = {**CONFIG_MAPPING[kind]().to_diff_dict(), "dtype": "float16"}
    config["text_config"] |= {"tie_word_embeddings": not top, "dtype": "bfloat16", "num_hidden_layers": 4}
    config["text_config"].pop("layer_types", None)
    by_default = config.pop("tie_word_embeddings")
    if top is not None:
        config["tie_word_embeddings"] = top
    read = read_hf_config(write_folder(tmp_path, config))
    assert (read["model_type"], read["dtype"], read["num_hidden_layers"]) == (kind, "float16", 4)
    is_tied = by_default if top is None else top
    assert config_says(read)[0]["untie_embeddings_and_output_weights"].value is not is_tied


@pytest.mark.parametrize("text", ["mistral", "gemma3_text", "qwen2"])
def test_a_folder_of_an_unknown_family_is_refused_whatever_its_language_model_is(tmp_path: Path, text: str) -> None:
    config = {"model_type": "llava", "text_config": {"model_type": text}, "vision_config": {"hidden_size": 8}}
    folder = write_folder(tmp_path, config)
    with pytest.raises(ConfigError, match="'llava', a family unknown here"):
        parse("--hf-checkpoint", folder)
    with pytest.raises(ConfigError, match="'llava'; weights can be converted for .*mistral"):
        parse(*DENSE, "--hf-checkpoint", folder, "--load", folder)


def test_a_pattern_keeps_its_mlp_layers_where_sglang_was_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_class = CONFIG_MAPPING["nemotron_h"]
    kinds = {"M": "mamba", "*": "attention"}  # as SGLang 0.5.15 reads it
    monkeypatch.setattr(
        config_class, "_pattern_to_list", staticmethod(lambda text: [kinds[c] for c in text if c in kinds])
    )
    config = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-", "num_hidden_layers": 5}
    read = config_says(read_hf_config(write_folder(tmp_path, config)))[0]
    assert read["num_layers"].value == 5


@pytest.mark.parametrize("kind", all_families())
def test_a_key_that_config_json_lacks_has_the_default_of_transformers_class(tmp_path: Path, kind: str) -> None:
    config_class = CONFIG_MAPPING[all_families()[kind].read_as(kind)]
    full = {**config_class().to_diff_dict(), "model_type": kind}
    if text := full.get("text_config"):  # the model's class may override defaults of the text class
        full["text_config"] = {**CONFIG_MAPPING[text["model_type"]]().to_diff_dict(), "model_type": text["model_type"]}
    said = config_says(read_hf_config(write_folder(tmp_path, full)))
    values = {name: flag.value for name, flag in said[0].items()}
    part = full.get("text_config") or full
    for place, key in [*((full, key) for key in full), *((part, key) for key in part)]:
        if key in ("model_type", "text_config"):
            continue
        value = place.pop(key, None)
        again = config_says(read_hf_config(write_folder(tmp_path, full)))
        assert {name: flag.value for name, flag in again[0].items()} == values, key
        assert again[1] == said[1], key
        place[key] = value


@pytest.mark.parametrize(
    ("kind", "attribute", "value"),
    [
        ("minimax_m2", "rotary_base", 5000000.0),
        ("gpt_oss", "rotary_base", 150000.0),
        ("gpt_oss", "position_embedding_type", "yarn"),
        ("gpt_oss", "rotary_scaling_factor", 32.0),
        ("gpt_oss", "norm_epsilon", 1e-5),
        ("glm4", "norm_epsilon", 1.5625e-07),
        ("glm4", "rotary_percent", 0.5),
        ("glm4_moe", "norm_epsilon", 1e-5),
        ("glm4_moe_lite", "moe_router_topk_scaling_factor", 1.8),
        ("glm_moe_dsa", "dsa_indexer_n_heads", 32),
        ("deepseek_v32", "dsa_indexer_n_heads", 64),
        ("kimi_k2", "moe_router_topk_scaling_factor", 2.5),
        ("qwen3_vl", "rotary_base", 500000.0),
        ("qwen3_5", "rotary_percent", 0.25),
        ("qwen3_next", "linear_attention_freq", [1, 1, 1, 0] * 12),
        ("gemma3_text", "rotary_base", 1000000.0),
        ("qwen3_moe", "moe_router_pre_softmax", True),
        ("qwen2_moe", "moe_shared_expert_intermediate_size", 5632),
        ("phi3", "norm_epsilon", 1e-5),
    ],
)
def test_defaults_of_classes_by_hand(tmp_path: Path, kind: str, attribute: str, value: Any) -> None:
    flag = config_says(read_hf_config(write_folder(tmp_path, {"model_type": kind})))[0][attribute]
    assert flag.value == value and flag.is_fact


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4'; it must be a whole number above 0"),
        ({"num_hidden_layers": -2}, "num_hidden_layers is '-2'; it must be a whole number above 0"),
        ({"hidden_size": 64.0}, "hidden_size is '64.0'; it must be a whole number above 0"),
        ({"vocab_size": True}, "vocab_size is 'True'; it must be a whole number above 0"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6'; it must be a number above 0"),
        ({"num_experts_per_tok": "8"}, "Qwen3MoeConfig of transformers refuses it: .*'num_experts_per_tok'"),
        ({"layer_types": ["full_attention"]}, "Qwen3MoeConfig of transformers refuses it: .*layer_types"),
        ({"model_type": None}, "has no model_type"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_file(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config = {**CONFIG_MAPPING["qwen3_moe"]().to_diff_dict(), **change}
    place = re.escape(f"--hf-checkpoint: {tmp_path}/config.json")
    for flags in ((), DENSE):
        with pytest.raises(ConfigError, match=f"{place}.*{message}"):
            parse(*flags, "--hf-checkpoint", write_folder(tmp_path, config))


def test_the_record_of_a_run_is_no_model_to_start_from(tmp_path: Path) -> None:
    """A run's folder also has a config.json, which describes the job."""
    model, run = tmp_path / "model", tmp_path / "run"
    for folder in (model, run):
        folder.mkdir()
    (run / "config.json").write_text(json.dumps({"args": {}}))
    (run / "events.jsonl").touch()
    words = ["--hf-checkpoint", write_folder(model, CONFIG_MAPPING["qwen3_moe"]().to_diff_dict())]
    assert parse(*words, "--load", str(run)).num_layers
