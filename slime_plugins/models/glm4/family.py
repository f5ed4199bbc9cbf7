"""GLM-4 and GLM-Z1 (9B, 32B): norms on both sides of attention and MLP, gate and up in one tensor.

GLM-4.5, 4.6 and 4.7: experts chosen by sigmoid scores with a bias, shared experts, an MTP layer.

With a vision tower, GLM-4 becomes GLM-4.1V and GLM-4.6V-Flash, and GLM-4.5 becomes GLM-4.5V and GLM-4.6V.  Each
position axis rotates a contiguous range of frequencies, time the lowest; no layer takes features of the tower.
"""

from __future__ import annotations

from dataclasses import replace

from slime.backends.megatron_utils.models.family import BLOCK_FP8, ModelFamily
from slime.backends.megatron_utils.models.flag_rules import PLAIN
from slime.backends.megatron_utils.models.rule import Rule, WeightMap
from slime_plugins.models.shared_flags import SIGMOID
from slime_plugins.models.shared_weights import (
    ATTENTION,
    COMPOSITE,
    JOINED_MLP,
    MLP,
    MTP,
    MTP_COPIES,
    NORMS,
    SIGMOID_EXPERTS,
    TOP,
)

GLM4 = WeightMap(
    family="GLM-4",
    top=TOP,
    layer=(
        *NORMS,
        *ATTENTION,
        Rule("post_self_attn_layernorm.weight", ("post_self_attn_layernorm.weight",)),
        Rule("post_mlp_layernorm.weight", ("post_mlp_layernorm.weight",)),
        *JOINED_MLP,
    ),
)
GLM4_MOE = WeightMap(
    family="GLM-4.5, 4.6 and 4.7",
    top=TOP,
    layer=(*NORMS, *ATTENTION, *MLP, *SIGMOID_EXPERTS),
    mtp=MTP,
    mtp_copies=MTP_COPIES,
)

SANDWICH = {"rotary_interleaved": True, "post_self_attn_layernorm": True, "post_mlp_layernorm": True}


VISION = {
    "depth": 24, "hidden_size": 1536, "num_heads": 12, "in_channels": 3, "image_size": 336, "patch_size": 14,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 4096,
}  # fmt: skip
"""``vision_config`` of the published models, which differ only in the width of the merger."""

FAMILIES = (
    ModelFamily(
        model_types=("glm4",),
        weight_map=GLM4,
        always=SANDWICH,
        spec="slime_plugins.models.glm4 get_glm_spec",
        is_spec_optional=True,
    ),
    ModelFamily(
        model_types=("glm4_moe",),
        weight_map=GLM4_MOE,
        always=SIGMOID,
        num_experts_key="n_routed_experts",
        published={"GLM-4.5-355B-A32B-FP8": {"model_type": "glm4_moe", "quantization_config": BLOCK_FP8}},
    ),
    ModelFamily(
        model_types=("glm4v",),
        weight_map=replace(GLM4, family="GLM-4V", **COMPOSITE),
        always={**SANDWICH, "add_qkv_bias": True},
        fixed={**PLAIN, "attention_bias": True},
        published={
            name: {"model_type": "glm4v", "vision_config": {**VISION, "intermediate_size": 13696}}
            for name in ("GLM-4.1V-9B-Thinking", "GLM-4.6V-Flash")
        },
    ),
    ModelFamily(
        model_types=("glm4v_moe",),
        weight_map=replace(GLM4_MOE, family="GLM-4V MoE", **COMPOSITE),
        always=SIGMOID,
        fixed={**PLAIN, "use_qk_norm": False},
        num_experts_key="n_routed_experts",
        published={
            name: {"model_type": "glm4v_moe", "vision_config": {**VISION, "intermediate_size": 10944}}
            for name in ("GLM-4.5V", "GLM-4.6V")
        },
    ),
)
