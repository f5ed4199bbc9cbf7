"""Flags of linear attention: values derived from config.json, and refusals that name the flag."""

from __future__ import annotations

import json

import pytest

from slime.backends.megatron_utils.flags.hf_config_check import check_hf_config
from slime.backends.megatron_utils.flags.model_dims import linear_layers
from slime.utils.errors import ConfigError
from tests.unit.backends.megatron_utils.megatron_case import parse

BASE = "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --group-query-attention --num-query-groups 4 "
BASE += (
    "--vocab-size 100 --ffn-hidden-size 96 --swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6"
)
SPEC = "--spec slime_plugins.models.qwen3_next get_qwen3_next_spec"
GATED = f"{SPEC} --attention-output-gate --apply-layernorm-1p"
CONFIG = {
    "model_type": "qwen3_next",
    **{"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4},
    **{"vocab_size": 100, "intermediate_size": 96, "num_experts": 0, "head_dim": 8},
    "full_attention_interval": 3,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 24,
}


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return ["--hf-checkpoint", str(tmp_path)]


def test_layers_and_sizes_come_from_the_checkpoint(checkpoint):
    args = parse(*BASE.split(), *checkpoint)
    assert linear_layers(args.linear_attention_freq, 4) == (True, True, False, True)
    assert args.attention_output_gate and args.apply_layernorm_1p and args.qk_layernorm
    sizes = (args.linear_num_key_heads, args.linear_num_value_heads, args.linear_key_head_dim)
    assert sizes == (8, 16, 24)
    assert (args.linear_value_head_dim, args.linear_conv_kernel_dim) == (128, 4)  # absent from config.json


def test_a_list_of_types_says_the_same_as_an_interval(tmp_path):
    types = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "layer_types": types}))
    args = parse(*BASE.split(), "--linear-attention-freq", "3", "--hf-checkpoint", str(tmp_path))
    assert args.linear_attention_freq == 3
    with pytest.raises(ConfigError, match=r"--linear-attention-freq is 2; the layers with full attention are \[2\]"):
        parse(*BASE.split(), "--linear-attention-freq", "2", "--hf-checkpoint", str(tmp_path))
    assert linear_layers(4, 4) == (True, True, True, False)
    assert linear_layers([0, 1], 2) == (False, True)
    assert linear_layers(None, 2) == (False, False)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{GATED} --linear-attention-freq 2", "--linear-attention-freq is 2; the layers with full attention are .2"),
        (f"{GATED} --linear-num-key-heads 4", "--linear-num-key-heads is 4; linear_num_key_heads is 8"),
        ("--no-attention-output-gate", "--attention-output-gate is not given; a qwen3_next has it"),
        ("--no-apply-layernorm-1p", "--apply-layernorm-1p is not given"),
        (
            f"{GATED} --tensor-model-parallel-size 4 --context-parallel-size 4 --actor-num-gpus-per-node 16",
            "--linear-num-key-heads is 8; .*4 x --context-parallel-size 4 = 16",
        ),
        (f"{GATED} --tensor-model-parallel-size 8 --actor-num-gpus-per-node 8", "--num-query-groups 4"),
    ],
)
def test_what_does_not_go_with_the_checkpoint_names_the_flag(flags, message, checkpoint):
    with pytest.raises(ConfigError, match=message):
        check_hf_config(parse(*BASE.split(), *flags.split(), *checkpoint))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (SPEC, "--linear-attention-freq is not given, and no --hf-checkpoint"),
        (f"{SPEC} --linear-attention-freq 4 --mtp-num-layers 2", "--mtp-num-layers is 2; .* has one"),
        (f"{SPEC} --linear-attention-freq [1,0]", "for each of the 4 layers"),
        (f"{SPEC} --linear-attention-freq 4 --linear-num-key-heads 12", "--linear-num-value-heads is 32"),
    ],
)
def test_flags_alone_must_make_sense(flags, message):
    with pytest.raises(ConfigError, match=message):
        parse(*BASE.split(), *flags.split())


@pytest.mark.parametrize("frequency", ["[1,0]", "0"])
def test_a_model_of_the_user_has_a_frequency_for_every_layer(frequency):
    words = [*BASE.split(), "--custom-model-provider-path", "some.module.provider"]
    with pytest.raises(ConfigError, match="--linear-attention-freq is .*at least 1, or a list with 1"):
        parse(*words, "--linear-attention-freq", frequency)
