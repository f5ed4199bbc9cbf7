"""DeepSeek-V3 and what is laid out like it: R1, Kimi-K2, Moonlight, GLM-4.7-Flash.

Multi-latent attention, dense layers first, then experts behind a sigmoid router with a bias, and shared experts.  The
sparse-attention models add their indexer's rules to :data:`LATENT_ATTENTION`.
"""

from __future__ import annotations

from slime.backends.megatron_utils.weight_maps.dense import MLP, NORMS, TOP
from slime.backends.megatron_utils.weight_maps.moe import EXPERTS, ROUTER, ROUTER_BIAS, shared_expert_rules
from slime.backends.megatron_utils.weight_maps.mtp import MTP, MTP_COPIES
from slime.backends.megatron_utils.weight_maps.rule import Rule, WeightMap

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
