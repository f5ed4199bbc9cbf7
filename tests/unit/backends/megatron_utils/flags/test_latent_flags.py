"""Flags of multi-latent attention against the HF config: derived values, refusals, and the model scripts."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published_configs import PUBLISHED
from slime.backends.megatron_utils.flags.config_builders import transformer_config_from_args
from slime.backends.megatron_utils.layers.rotary import LatentRotary
from slime.backends.megatron_utils.models.flag_rules import hf_rope_settings, hf_yarn_settings
from slime.utils.errors import ConfigError
from tests.matrix.case import load_cases
from tests.unit.backends.megatron_utils.megatron_case import parse
from tests.unit.scripts.test_model_files import model_args

DEEPSEEK_V3 = PUBLISHED["deepseek-v3"]


def write_config(folder: Path, config: dict[str, Any]) -> list[str]:
    (folder / "config.json").write_text(json.dumps(config))
    return ["--hf-checkpoint", str(folder)]


@pytest.mark.parametrize(
    ("name", "factor", "beta_fast"),
    [("deepseek-v3", 40.0, 32.0), ("kimi-k2", 32.0, 1.0), ("kimi-k2-thinking", 64.0, 32.0), ("moonlight", 1.0, 32.0)],
)
def test_published_positions_are_stretched_as_their_config_says(
    name: str, factor: float, beta_fast: float, tmp_path: Path
) -> None:
    args = parse(*write_config(tmp_path, PUBLISHED[name]))
    assert (args.rotary_scaling_factor, args.beta_fast) == (factor, beta_fast)
    rotary = LatentRotary.from_config(transformer_config_from_args(args))
    assert rotary.factor == factor
    if factor == 1.0:
        assert rotary.magnitude == 1.0
        assert rotary.softmax_scale(args.qk_head_dim + 64) == (args.qk_head_dim + 64) ** -0.5


@pytest.mark.parametrize("wrong", ["kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "n_routed_experts", "n_group"])
def test_a_size_that_differs_is_refused_with_both_values(wrong: str, tmp_path: Path) -> None:
    config = {**DEEPSEEK_V3, wrong: DEEPSEEK_V3[wrong] * 2}
    with pytest.raises(ConfigError, match=rf"is {DEEPSEEK_V3[wrong]}; {wrong} is {DEEPSEEK_V3[wrong] * 2}"):
        parse(*model_args("deepseek-v3"), *write_config(tmp_path, config))


# Rotary flags


def tiny(folder: Path, config: dict[str, Any], *flags: str) -> Namespace:
    """Args of the matrix's tiny DeepSeek-V3 with changes to its config."""
    case = load_cases(["deepseek_v3"])["deepseek_v3"]
    write_config(folder, {**case.config, **config})
    return parse("--hf-checkpoint", str(folder), *case.flags(folder), *flags)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "beta_fast": 2.0,
    "beta_slow": 0.3,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
    "original_max_position_embeddings": 8,
}
OLD_YARN = {"type": "yarn", **{name: value for name, value in YARN.items() if name not in ("rope_type", "rope_theta")}}


@pytest.mark.parametrize(
    "config",
    [{"rope_parameters": YARN}, {"rope_parameters": None, "rope_theta": 100.0, "rope_scaling": OLD_YARN}],
    ids=["rope_parameters", "rope_scaling"],
)
def test_configs_of_both_ages_give_the_flags_that_were_left_out(config: dict[str, Any], tmp_path: Path) -> None:
    args = tiny(tmp_path, config)
    assert args.rope_type == "yarn"
    assert (args.rotary_scaling_factor, args.original_max_position_embeddings) == (8.0, 8)
    assert (args.beta_fast, args.beta_slow, args.mscale, args.mscale_all_dim) == (2.0, 0.3, 0.7, 1.2)


def test_what_yarn_leaves_open_is_what_transformers_takes(tmp_path: Path) -> None:
    open_yarn = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
    args = tiny(tmp_path, {"rope_parameters": open_yarn, "max_position_embeddings": 64})
    assert (args.original_max_position_embeddings, args.beta_fast, args.beta_slow) == (64, 32.0, 1.0)
    rotary = LatentRotary.from_config(transformer_config_from_args(args))
    assert rotary.magnitude == pytest.approx(1.1386294361)  # 0.1 * ln 4 + 1
    assert rotary.softmax_scale(16) == 0.25


def test_yarn_without_a_factor_or_a_length_to_derive_it_from_is_refused() -> None:
    with pytest.raises(ConfigError, match="no factor, and no max_position_embeddings"):
        hf_yarn_settings({"rope_scaling": {"rope_type": "yarn"}})


@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
def test_rotary_settings_of_gemma_that_are_null_say_nothing(kind: str, tmp_path: Path) -> None:
    case = load_cases(["gemma3"])["gemma3"]
    rotary = {**case.config["rope_parameters"], kind: None}
    assert parse(*write_config(tmp_path, {**case.config, "rope_parameters": rotary})).position_embedding_type == "rope"


@pytest.mark.parametrize("flags", [(), ("--rope-type", "rope"), ("--rope-type", "yarn"), ("--mscale", "0.5")])
def test_a_model_that_was_never_stretched_is_not_stretched(flags: tuple[str, ...], tmp_path: Path) -> None:
    args = tiny(tmp_path, {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}, *flags)
    rotary = LatentRotary.from_config(transformer_config_from_args(args))
    assert (rotary.factor, rotary.magnitude, rotary.softmax_scale(16)) == (1.0, 1.0, 0.25)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rotary-scaling-factor 40", "--rotary-scaling-factor is 40.0; factor is 8.0"),
        ("--mscale 1.0", "--mscale is 1.0; mscale is 0.7"),
        ("--mscale-all-dim 1.0", "--mscale-all-dim is 1.0; mscale_all_dim is 1.2"),
        ("--beta-fast 32", "--beta-fast is 32.0; beta_fast is 2.0"),
        (
            "--original-max-position-embeddings 4096",
            "--original-max-position-embeddings is 4096; original_max_position_embeddings is 8",
        ),
        ("--rope-type rope", "--rope-type is rope; rope_type is yarn"),
        ("--rotary-base 9", "--rotary-base is 9.0; rope_theta is 100.0"),
    ],
)
def test_a_flag_that_contradicts_the_config_is_refused_with_both(flags: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(tmp_path, {"rope_parameters": YARN}, *flags.split())


def test_megatrons_factor_for_a_plain_model_is_refused(tmp_path: Path) -> None:
    plain = {"rope_type": "default", "rope_theta": 100.0}
    with pytest.raises(ConfigError, match="--rotary-scaling-factor is 40.0; factor is 1.0"):
        tiny(tmp_path, {"rope_parameters": plain}, "--rotary-scaling-factor", "40")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rotary positions of type 'linear'"),
        ({"rope_parameters": {**YARN, "attention_factor": 1.5}}, "attention_factor 1.5"),
        ({"rope_parameters": {**YARN, "attn_factor": 0.88}}, "attn_factor 0.88"),
        ({"rope_parameters": {**YARN, "truncate": False}}, "truncate False"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"q_lora_rank": 16}, "--q-lora-rank is 28; q_lora_rank is 16"),
        ({"q_lora_rank": None}, "--q-lora-rank is 28; q_lora_rank is None"),
    ],
)
def test_a_model_that_latent_attention_cannot_compute_is_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    case = load_cases(["deepseek_v3"])["deepseek_v3"]
    write_config(tmp_path, dict(case.config))
    flags = case.flags(tmp_path)
    write_config(tmp_path, {**case.config, **config})
    with pytest.raises(ConfigError, match=message):
        parse("--hf-checkpoint", str(tmp_path), *flags)


def test_yarn_without_latent_attention_is_refused() -> None:
    flags = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --vocab-size 64 --rotary-scaling-factor 4"
    with pytest.raises(ConfigError, match="--rotary-scaling-factor is 4.0 without --multi-latent-attention"):
        parse(*flags.split())


def test_the_base_is_found_in_configs_of_both_ages() -> None:
    assert hf_rope_settings({"rope_theta": 5.0})["rope_theta"] == 5.0
    assert hf_rope_settings({"rope_parameters": {"rope_theta": 5.0}})["rope_theta"] == 5.0


# The router


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"scoring_func": "softmax"}, "scoring_func is softmax"),
        ({"routed_scaling_factor": 1.0}, "--moe-router-topk-scaling-factor is 2.5; routed_scaling_factor is 1.0"),
        ({"topk_group": 1}, "--moe-router-group-topk is 2; topk_group is 1"),
        ({"n_shared_experts": 2}, "--moe-shared-expert-intermediate-size is 20"),
        (
            {"first_k_dense_replace": 1},
            r"--moe-layer-freq is \[0, 0, 1, 1, 1\]; the dense layers of the model are \[0\]",
        ),
        ({"num_experts_per_tok": 6}, "--moe-router-topk is 4; num_experts_per_tok is 6"),
    ],
)
def test_a_router_that_differs_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    case = load_cases(["deepseek_v3"])["deepseek_v3"]
    write_config(tmp_path, dict(case.config))
    flags = case.flags(tmp_path)
    write_config(tmp_path, {**case.config, **config})
    with pytest.raises(ConfigError, match=message):
        parse("--hf-checkpoint", str(tmp_path), *flags)


def test_groups_ranked_by_other_than_their_best_two_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"best 6 // 2 \(topk_group\), the model by its best two"):
        tiny(tmp_path, {"num_experts_per_tok": 6})


def test_one_expert_per_token_is_refused_where_its_weight_would_be_normalised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--moe-router-topk is 1"):
        tiny(tmp_path, {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1})
