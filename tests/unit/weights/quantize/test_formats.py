"""What a converter quantizes, by name."""

import pytest
import torch

from slime.utils.errors import DataError
from slime.weights.quantize.block_fp8 import FP8
from slime.weights.quantize.formats import (
    PlainWeights,
    TensorFp8,
    is_quantized_offline,
    modules_to_not_convert,
    read_weight,
)

QUANTIZED = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
    "model.layers.0.self_attn.kv_b_proj.weight",
    "model.layers.0.self_attn.indexer.wq_b.weight",
    "model.layers.0.self_attn.indexer.wk.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.gate_up_proj.weight",
    "model.layers.3.mlp.experts.17.down_proj.weight",
    "model.layers.3.mlp.shared_experts.up_proj.weight",
    "model.layers.3.mlp.shared_expert.up_proj.weight",
    "model.mtp_layers.0.self_attn.k_proj.weight",
)
PLAIN = PlainWeights(
    ("weights_proj", "shared_expert_gate", "eh_proj.weight", "shared_head.head.weight", "input_proj.weight"),
    (r"model\.visual\..+",),
)
KEPT = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.0.self_attn.q_norm.weight",
    "model.layers.0.self_attn.kv_a_layernorm.weight",
    "model.layers.0.self_attn.indexer.weights_proj.weight",
    "model.layers.0.self_attn.indexer.k_norm.bias",
    "model.layers.3.mlp.gate.weight",
    "model.layers.3.mlp.gate.e_score_correction_bias",
    "model.layers.3.mlp.shared_expert_gate.weight",
    "model.layers.61.eh_proj.weight",
    "model.layers.61.embed_tokens.weight",
    "model.layers.61.shared_head.head.weight",
    "model.layers.61.shared_head.norm.weight",
    "model.mtp_layers.0.input_proj.weight",
    "model.visual.blocks.0.attn.qkv.weight",
)


@pytest.mark.parametrize("name", QUANTIZED)
def test_matrices_of_attention_mlp_and_experts_are_quantized(name):
    assert is_quantized_offline(name, plain=PLAIN)
    assert is_quantized_offline(name, (128, 64), PLAIN)


@pytest.mark.parametrize("name", KEPT)
def test_the_rest_is_kept(name):
    assert not is_quantized_offline(name, plain=PLAIN)


def test_the_config_names_the_matrices_that_are_kept():
    assert modules_to_not_convert([*QUANTIZED, *KEPT], PLAIN) == [
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.self_attn.indexer.weights_proj",
        "model.layers.3.mlp.gate",
        "model.layers.3.mlp.shared_expert_gate",
        "model.layers.61.eh_proj",
        "model.layers.61.embed_tokens",
        "model.layers.61.shared_head.head",
        "model.mtp_layers.0.input_proj",
        "model.visual.blocks.0.attn.qkv",
        "visual",
    ]


def test_a_weight_with_more_scales_than_the_config_says_is_named():
    stored = {"up.weight": torch.ones(2, 4).to(FP8), "up.weight_scale": torch.ones(3)}
    with pytest.raises(DataError, match=r"up\.weight has 3 scales; config\.json says one per tensor"):
        read_weight("up.weight", stored.__getitem__, stored, TensorFp8())
