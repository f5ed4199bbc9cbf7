"""DeepSeek-V3 and what is laid out like it: R1, Kimi-K2, Moonlight, GLM-4.7-Flash; GLM-5, GLM-5.2 and DeepSeek-V3.2.

Multi-latent attention, dense layers first, then experts behind a sigmoid router with a bias, and shared experts.

The last three add the indexer of sparse attention.  Its heads turn in their first dimensions in the checkpoint, and in
their last ones here, as those of Megatron do.  With index sharing only the layers that choose keys have an indexer.
"""

from __future__ import annotations

from dataclasses import replace

from slime.backends.megatron_utils.models.rule import ModelFamily, Rule, WeightMap
from slime.backends.megatron_utils.models.shared_rules import (
    EXPERTS,
    MLP,
    MTP,
    MTP_COPIES,
    NORMS,
    ROUTER,
    ROUTER_BIAS,
    TOP,
    shared_expert_rules,
)
from slime.backends.megatron_utils.models.weight_layouts import turning_part_first, turning_part_last

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
EXPERTS_BEHIND_SIGMOID = (*ROUTER, *ROUTER_BIAS, *EXPERTS, *shared_expert_rules("shared_experts"))

DEEPSEEK = WeightMap(
    family="DeepSeek-V3 and models laid out like it",
    top=TOP,
    layer=(*NORMS, *LATENT_ATTENTION, *MLP, *EXPERTS_BEHIND_SIGMOID),
    mtp=MTP,
    mtp_copies=MTP_COPIES,
    together=FUSED_BY_ENGINES,
)


def _turning_rule(name: str) -> Rule:
    """A parameter with one row per dimension of the indexer's heads."""
    return Rule(
        f"self_attention.{name}",
        (f"self_attn.indexer.{name}",),
        merge=lambda tensors, shape: turning_part_last(tensors[0], shape),
        split=lambda tensor, shape: (turning_part_first(tensor, shape),),
    )


INDEXER = (
    *(_turning_rule(name) for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias")),
    Rule("self_attention.weights_proj.weight", ("self_attn.indexer.weights_proj.weight",)),
)

DEEPSEEK_SPARSE = replace(DEEPSEEK, family="GLM-5, GLM-5.2 and DeepSeek-V3.2", layer=(*DEEPSEEK.layer, *INDEXER))

FAMILIES = (
    ModelFamily(model_types=("deepseek_v3", "kimi_k2", "glm4_moe_lite"), weight_map=DEEPSEEK),
    ModelFamily(model_types=("deepseek_v32", "glm_moe_dsa"), weight_map=DEEPSEEK_SPARSE),
)
