"""DeepSeek-V3 and what is laid out like it: R1, Kimi-K2 (the text of 2.5), Moonlight, GLM-4.7-Flash; GLM-5, V3.2.

Multi-latent attention, dense layers first, then experts with a biased sigmoid router, and shared experts.

The last three add the indexer of sparse attention.  Its heads turn in their first dimensions in the checkpoint, and in
their last ones here, as those of Megatron do.  With index sharing only the layers that choose keys have an indexer.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slime.backends.megatron_utils.models.family import BLOCK_FP8, ModelFamily
from slime.backends.megatron_utils.models.flag_rules import SIGMOID
from slime.backends.megatron_utils.models.rule import (
    MLP,
    MTP,
    MTP_COPIES,
    NORMS,
    SIGMOID_EXPERTS,
    TEXT_PART,
    TOP,
    Rule,
    WeightMap,
    relaid_rule,
)
from slime.backends.megatron_utils.models.weight_layouts import turning_part_first, turning_part_last
from slime.utils.files import language_config
from slime_plugins.models.glm5.index_sharing import index_sharing

LATENT_ATTENTION = (
    # With --q-lora-rank queries come out of a latent, without it from one projection.
    Rule("self_attention.linear_q_proj.weight", ("self_attn.q_proj.weight",)),
    Rule("self_attention.linear_q_down_proj.weight", ("self_attn.q_a_proj.weight",)),
    Rule("self_attention.linear_q_up_proj.weight", ("self_attn.q_b_proj.weight",)),
    Rule("self_attention.linear_kv_down_proj.weight", ("self_attn.kv_a_proj_with_mqa.weight",)),
    Rule("self_attention.linear_kv_up_proj.weight", ("self_attn.kv_b_proj.weight",)),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",)),
    # Two spellings each: our layers keep the norms apart, TransformerEngine's inside the projection that follows.
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_a_layernorm.weight",)),
    Rule("self_attention.linear_q_up_proj.layer_norm_weight", ("self_attn.q_a_layernorm.weight",)),
    Rule("self_attention.kv_layernorm.weight", ("self_attn.kv_a_layernorm.weight",)),
    Rule("self_attention.linear_kv_up_proj.layer_norm_weight", ("self_attn.kv_a_layernorm.weight",)),
)
FUSED_BY_ENGINES = (
    # SGLang joins the two in one parameter, and drops whichever comes in a call without the other.
    ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
)

DEEPSEEK = WeightMap(
    family="DeepSeek-V3 and models laid out like it",
    top=TOP,
    layer=(*NORMS, *LATENT_ATTENTION, *MLP, *SIGMOID_EXPERTS),
    mtp=MTP,
    mtp_copies=MTP_COPIES,
    together=FUSED_BY_ENGINES,
)


INDEXER = (
    *(
        # One row per dimension of the indexer's heads.
        relaid_rule(f"self_attention.{name}", f"self_attn.indexer.{name}", turning_part_last, turning_part_first)
        for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias")
    ),
    Rule("self_attention.weights_proj.weight", ("self_attn.indexer.weights_proj.weight",)),
)

DEEPSEEK_SPARSE = replace(
    DEEPSEEK,
    family="GLM-5, GLM-5.2 and DeepSeek-V3.2",
    layer=(*DEEPSEEK.layer, *INDEXER),
    computed_in_fp32=(".weights_proj.weight",),
    not_applied=(".linear_kv_up_proj.weight",),
    plain_parts=("weights_proj",),  # weighs the indexer's heads
)

INDEXER_SIZES = {
    # key of config.json -> attribute of args
    "index_n_heads": "dsa_indexer_n_heads",
    "index_head_dim": "dsa_indexer_head_dim",
    "index_topk": "dsa_indexer_topk",
}
SPARSE_SPEC = "slime_plugins.models.glm5.glm5 get_glm5_spec"


def sparse_dims(args: Namespace, hf_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the dimensions of sparse attention; without a config.json, which alone tells its layers, none."""
    if hf_config is None:
        return {}
    return {
        "attention": "sparse",
        "computes_index": index_sharing(hf_config, args.num_layers).is_computing,
        "index_heads": args.dsa_indexer_n_heads,
        "index_topk": args.dsa_indexer_topk,
    }


def text_alone(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's part of a config.json that transformers has no class for."""
    return {**language_config(dict(config)), "text_config": None}


_FP8 = {"model_type": "deepseek_v3", "quantization_config": BLOCK_FP8}
_INT4 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
}
_INDEX = {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048}
_GLM5: dict[str, Any] = {"model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"], **_INDEX}
_GLM52: dict[str, Any] = {**_GLM5, "index_topk_freq": 4, "index_skip_topk_offset": 3}

_SPARSE = ModelFamily(
    model_types=("deepseek_v32",),
    weight_map=DEEPSEEK_SPARSE,
    always=SIGMOID,
    sizes=INDEXER_SIZES,
    num_experts_key="n_routed_experts",
    spec=SPARSE_SPEC,
    dims=sparse_dims,
    sparse_architecture="DeepseekV32ForCausalLM",
)
FAMILIES = (
    ModelFamily(
        model_types=("deepseek_v3", "kimi_k2", "glm4_moe_lite"),
        config_class="deepseek_v3",
        weight_map=DEEPSEEK,
        always=SIGMOID,
        num_experts_key="n_routed_experts",
        published={
            "DeepSeek-R1": _FP8,
            "DeepSeek-V3": _FP8,
            "Kimi-K2-Instruct": {"quantization_config": BLOCK_FP8},
            "Kimi-K2-Thinking": {"quantization_config": _INT4},
        },
    ),
    ModelFamily(
        model_types=("kimi_k25",),
        config_class="deepseek_v3",
        spelled_out=text_alone,
        weight_map=replace(DEEPSEEK, family="Kimi-K2.5 (text)", **TEXT_PART),
        always=SIGMOID,
        num_experts_key="n_routed_experts",
        published={"Kimi-K2.5": {"model_type": "kimi_k25", "quantization_config": _INT4}},
    ),
    _SPARSE,
    replace(
        _SPARSE,
        model_types=("glm_moe_dsa",),
        sparse_architecture="GlmMoeDsaForCausalLM",
        published={
            "GLM-5": _GLM5,
            "GLM-5-FP8": {**_GLM5, "quantization_config": BLOCK_FP8},
            "GLM-5.2": _GLM52,
            "GLM-5.2-FP8": {**_GLM52, "quantization_config": BLOCK_FP8},
        },
    ),
)
