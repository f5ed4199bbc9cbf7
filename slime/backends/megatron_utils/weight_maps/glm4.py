"""GLM-4 and GLM-Z1 (9B, 32B): norms on both sides of attention and MLP, gate and up in one tensor."""

from __future__ import annotations

from slime.backends.megatron_utils.weight_maps.dense import ATTENTION, NORMS, TOP
from slime.backends.megatron_utils.weight_maps.rule import Rule, WeightMap

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
