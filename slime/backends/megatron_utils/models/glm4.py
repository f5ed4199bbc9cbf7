"""GLM-4 and GLM-Z1 (9B, 32B): norms on both sides of attention and MLP, gate and up in one tensor.

GLM-4.5, 4.6 and 4.7: experts chosen by sigmoid scores with a bias, shared experts, an MTP layer.
"""

from __future__ import annotations

from slime.backends.megatron_utils.models.family import BLOCK_FP8, ModelFamily
from slime.backends.megatron_utils.models.flag_rules import SIGMOID
from slime.backends.megatron_utils.models.rule import Rule, WeightMap
from slime.backends.megatron_utils.models.shared_rules import (
    ATTENTION,
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

GLM4 = WeightMap(
    family="GLM-4",
    top=TOP,
    layer=(
        *NORMS,
        *ATTENTION,
        Rule("post_self_attn_layernorm.weight", ("post_self_attn_layernorm.weight",)),
        Rule("post_mlp_layernorm.weight", ("post_mlp_layernorm.weight",)),
        Rule("mlp.linear_fc1.weight", ("mlp.gate_up_proj.weight",)),
        Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
    ),
)
GLM4_MOE = WeightMap(
    family="GLM-4.5, 4.6 and 4.7",
    top=TOP,
    layer=(*NORMS, *ATTENTION, *MLP, *ROUTER, *ROUTER_BIAS, *EXPERTS, *shared_expert_rules("shared_experts")),
    mtp=MTP,
    mtp_copies=MTP_COPIES,
)

HALF_TURNS = {"partial_rotary_factor": 0.5}
SANDWICH = {"rotary_interleaved": True, "post_self_attn_layernorm": True, "post_mlp_layernorm": True}

FAMILIES = (
    ModelFamily(
        model_types=("glm4",),
        weight_map=GLM4,
        always=SANDWICH,
        class_defaults=HALF_TURNS,
        spec="slime_plugins.models.glm4 get_glm_spec",
        is_spec_optional=True,
    ),
    ModelFamily(
        model_types=("glm4_moe",),
        weight_map=GLM4_MOE,
        always=SIGMOID,
        class_defaults={**HALF_TURNS, "use_qk_norm": False},
        num_experts_key="n_routed_experts",
        published={"GLM-4.5-355B-A32B-FP8": {"model_type": "glm4_moe", "quantization_config": BLOCK_FP8}},
    ),
)
