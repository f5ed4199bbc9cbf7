"""scripts/models/*.sh against the configs of the published models (benchmarks/published_configs.py).

Every file has the values that follow from its model's config.json, and the checks find any number that differs.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published_configs import PUBLISHED, WITHOUT_A_FILE, yarn
from slime.backends.megatron_utils.flags.hf_config_check import (
    FIXED_FLAGS,
    FREE_FLAGS,
    MODEL_FLAGS,
    OF_GROUPED_ATTENTION,
    config_says,
    disagreements,
    read_hf_config,
)
from slime.utils.errors import ConfigError
from tests.contracts.source_tree import REPO
from tests.unit.backends.megatron_utils.megatron_case import parse

OURS = {"tiny-arithmetic"}


def model_args(name: str, **environment: str) -> list[str]:
    """MODEL_ARGS as a recipe would pass them."""
    path = REPO / f"scripts/models/{name}.sh"
    script = f'set -eu; source {shlex.quote(str(path))}; printf "%s\\0" "${{MODEL_ARGS[@]}}"'
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MODEL_ARGS")}
    run = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True, env=clean | environment)
    return run.stdout.split("\0")[:-1]


SPELLED_OTHERWISE = {"use_rotary_position_embeddings", "use_gated_attention", "add_position_embedding"}
NOMINAL = {"max_position_embeddings", "seq_length", "make_vocab_size_divisible_by", "padded_vocab_size"}
OF_THE_LAYOUT = {"allgather_cp", "enable_experimental"}
OPTIONAL = {"spec"}  # GLM-4 has a spec, but its flags describe its layers
OF_THE_FOLDER = {"hf_checkpoint", "tokenizer_model", "tower_dims", "has_own_tower"}
LEFT_TO_CONFIG = ("--rotary-scaling-factor", "--rope-type", "--beta-fast", "--dsa-indexer-")
"""Flags that model files omit: YaRN's numbers where releases differ, and the sizes of indexers."""


def write_config(folder: Path, config: dict[str, Any]) -> list[str]:
    (folder / "config.json").write_text(json.dumps(config))
    return ["--hf-checkpoint", str(folder)]


def test_every_model_file_is_checked_here():
    files = {path.stem for path in (REPO / "scripts/models").glob("*.sh")}
    assert files == set(PUBLISHED) | OURS


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_file_says_what_is_derived_from_the_published_config(name, tmp_path):
    derived = parse(*write_config(tmp_path, PUBLISHED[name]))
    by_hand = parse(*model_args(name))  # nothing is filled in
    differ = disagreements(by_hand, read_hf_config(str(tmp_path)))
    assert [line for line in differ if not line.startswith(LEFT_TO_CONFIG)] == []
    said = config_says(read_hf_config(str(tmp_path)))[0]
    for name, value in vars(derived).items():
        if name not in said and name not in SPELLED_OTHERWISE | NOMINAL | OF_THE_LAYOUT | OPTIONAL | MODEL_FLAGS:
            assert vars(by_hand)[name] == value or name in OF_THE_FOLDER, name


PHI4, SMOLLM2 = WITHOUT_A_FILE["phi-4"], WITHOUT_A_FILE["smollm2-135M"]
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {**SMOLLM2, "model_type": "granite", **GRANITE},
            "'granite', a family unknown here",
        ),
        ({**SMOLLM2, "attention_bias": True}, "attention_bias is True; the layers of a llama have False"),
        ({**PHI4, "sliding_window": 2047}, "sliding_window is 2047 of max_position_embeddings 16384"),
        (
            {**PHI4, "rope_scaling": {"type": "longrope", "long_factor": [1.0] * 64, "short_factor": [1.0] * 64}},
            "rope_type is longrope",
        ),
        ({}, "config.json has no model_type"),
    ],
)
def test_a_config_that_nothing_here_computes_is_refused_by_what_it_asks_for(config, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        parse(*write_config(tmp_path, config))


QWEN35_27B = PUBLISHED["qwen3.5-27B"]["text_config"]
GEMMA4 = PUBLISHED["gemma4-31B"]["text_config"]
MISTRAL_SMALL = PUBLISHED["mistral-small-3.1-24B"]["text_config"]
OSS_ROPE = PUBLISHED["gpt-oss-20b"]["rope_scaling"]
BY_EIGHT = PUBLISHED["llama3.1-8B-Instruct"]["rope_scaling"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama3.2-1B-Instruct", {"rope_scaling": BY_EIGHT}, "--rope-scaling-factor is 32"),
        ("llama3.1-8B-Instruct", {"rope_scaling": None}, "--use-rope-scaling is given; rope_type is default"),
        ("qwen2.5-7B", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type is yarn"),
        ("deepseek-v3", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("deepseek-v4-flash", {"sliding_window": 64}, "--window-size is .127, 0.; .* 63,0"),
        ("deepseek-v4-flash", {"scoring_func": "sigmoid"}, "scoring_func is sigmoid; the layers of a deepseek_v4"),
        ("qwen3-30B-A3B", {"num_experts_per_tok": 4}, "--moe-router-topk is 8"),
        ("glm4-9B", {"partial_rotary_factor": 1.0}, "--rotary-percent is 0.5"),
        ("qwen3-next-80B-A3B", {"full_attention_interval": 3}, "--linear-attention-freq is 4"),
        (
            "qwen3.5-27B",
            {"text_config": QWEN35_27B | {"linear_num_value_heads": 32}},
            "--linear-num-value-heads is 48",
        ),
        ("qwen3.5-27B", {"tie_word_embeddings": True}, "--untie-embeddings-and-output"),
        ("gemma3-1B", {"sliding_window": 1024}, "--window-size is .511, 0.; .* 1023,0"),
        ("gemma4-31B", {"text_config": GEMMA4 | {"head_dim": 128}}, "--kv-channels is 256; head_dim is 128"),
        ("gemma4-31B", {"text_config": GEMMA4 | {"enable_moe_block": True}}, "True, but num_experts is None"),
        ("nemotron3-nano-30B-A3B", {"n_groups": 4}, "--linear-num-key-heads is 8; n_groups is 4"),
        ("nemotron3-nano-30B-A3B", {"time_step_limit": [0.0, 1.0]}, "time_step_limit is .0.0, 1.0.; the steps"),
        ("nemotron3-nano-30B-A3B", {"moe_latent_size": 1024}, "moe_latent_size is 1024"),
        ("nemotron3-nano-30B-A3B", {"hybrid_override_pattern": "EM*"}, "--num-layers is 52"),
        ("olmo3-7B", {"attention_bias": True}, "attention_bias is True; the layers of a olmo3 have False"),
        ("seed-oss-36B", {"attention_out_bias": True}, "attention_out_bias is True; the layers of a seed_oss have"),
        (
            "mistral-small-3.1-24B",
            {"text_config": MISTRAL_SMALL | {"rope_parameters": {"llama_4_scaling_beta": 0.1}}},
            "llama_4_scaling_beta is 0.1; queries are not scaled",
        ),
        ("mixtral-8x7B", {"head_dim": 64}, "head_dim is 64 of 32 heads; SGLang has .* 128"),
        ("deepseek-v3", {"rope_scaling": yarn(64, 32)}, "--rotary-scaling-factor is 40"),
        ("gpt-oss-20b", {"sliding_window": 64}, "--window-size is .127, 0.; .* 63,0"),
        ("gpt-oss-20b", {"swiglu_limit": 6.0}, "--activation-func-clamp-value is 7.0; this model has 6.0"),
        (
            "gpt-oss-20b",
            {"rope_scaling": OSS_ROPE | {"factor": 16.0}},
            "--rotary-scaling-factor is 32.0; factor is 16",
        ),
        ("gpt-oss-20b", {"rope_scaling": OSS_ROPE | {"truncate": True}}, "--yarn-truncate is not given; truncate"),
        (
            "gpt-oss-20b",
            {"rope_scaling": {"rope_type": "default"}},
            "--position-embedding-type is yarn; rope_type is default",
        ),
        ("minimax-m2", {"intermediate_size": 768}, "--moe-ffn-hidden-size is 1536"),
        ("minimax-m2", {"rotary_dim": 128}, "--rotary-percent is 0.5; rotary_dim is 128 of head_dim 128"),
        ("minimax-m2", {"qk_norm_type": "per_head"}, "norms all heads together"),
        ("minimax-m2", {"use_qk_norm": False}, "--qk-layernorm is given"),
        ("minimax-m2", {"use_routing_bias": False}, "--moe-router-enable-expert-bias is given"),
        ("minimax-m2", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("minimax-m2", {"scoring_func": "softmax"}, "--moe-router-score-function is sigmoid"),
    ],
)
def test_what_would_only_give_wrong_log_probs_is_an_error(name, change, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED[name], **change}))
    with pytest.raises(ConfigError, match=message):
        parse(*model_args(name), "--hf-checkpoint", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("qwen3-4B", "--rotary-percent 0.5", "--rotary-percent is 0.5; a qwen3 has nothing of the kind"),
        ("qwen3-4B", "--apply-layernorm-1p", "--apply-layernorm-1p is given; a qwen3 has"),
        ("qwen3-4B", "--softmax-scale 0.5", "--softmax-scale is 0.5; a qwen3 has"),
        ("qwen3-4B", "--post-mlp-layernorm", "--post-mlp-layernorm is given; a qwen3 has"),
        ("qwen3-4B", "--use-gated-attention", "--attention-output-gate is given; a qwen3 has"),
        ("qwen3-4B", "--no-rope-freq 4", "--no-rope-freq is 4; a qwen3 has"),
        ("qwen2.5-7B", "--kv-channels 64", "--kv-channels is 64; hidden_size / num_attention_heads is 128"),
        ("qwen3-30B-A3B", "--moe-router-topk-scaling-factor 2.5", "-scaling-factor is 2.5; a qwen3_moe has nothing"),
        ("deepseek-v3", "--window-size 127,0", r"--window-size is \(127, 0\); a deepseek_v3 has"),
    ],
)
def test_a_flag_that_changes_the_model_and_of_which_config_json_says_nothing_is_an_error(
    name, flags, message, tmp_path
):
    with pytest.raises(ConfigError, match=message):
        parse(*model_args(name), *flags.split(), *write_config(tmp_path, PUBLISHED[name]))


@pytest.mark.parametrize("name", ["qwen3-30B-A3B", "deepseek-v3", "gpt-oss-20b", "qwen3-next-80B-A3B", "minimax-m2"])
def test_no_model_flag_can_differ_from_config_json(name, tmp_path):
    args = parse(*write_config(tmp_path, PUBLISHED[name]))
    config = read_hf_config(args.hf_checkpoint)
    said = config_says(config)[0]
    free = FREE_FLAGS | (OF_GROUPED_ATTENTION if args.multi_latent_attention else frozenset())
    free = {attribute for attribute in free | said.keys() if attribute not in said or not said[attribute].is_fact}
    assert disagreements(args, config) == []
    for attribute in (MODEL_FLAGS | FIXED_FLAGS) - free:
        value = vars(args)[attribute]
        other: Any = not value if isinstance(value, bool) else (3, 0) if attribute == "window_size" else 3
        changed = Namespace(**{**vars(args), attribute: other})
        assert disagreements(changed, config), attribute
