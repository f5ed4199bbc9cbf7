"""GLM-4.5, 4.6 and 4.7: experts chosen by sigmoid scores with a bias, shared experts, an MTP layer."""

from __future__ import annotations

from slime.backends.megatron_utils.weight_maps.dense import ATTENTION, MLP, NORMS, TOP
from slime.backends.megatron_utils.weight_maps.moe import EXPERTS, ROUTER, ROUTER_BIAS, shared_expert_rules
from slime.backends.megatron_utils.weight_maps.rule import Rule, WeightMap

MTP = (
    Rule("eh_proj.weight", ("eh_proj.weight",)),
    Rule("enorm.weight", ("enorm.weight",)),
    Rule("hnorm.weight", ("hnorm.weight",)),
    Rule("final_layernorm.weight", ("shared_head.norm.weight",)),
)

GLM4_MOE = WeightMap(
    family="GLM-4.5, 4.6 and 4.7",
    top=TOP,
    layer=(*NORMS, *ATTENTION, *MLP, *ROUTER, *ROUTER_BIAS, *EXPERTS, *shared_expert_rules("shared_experts")),
    mtp=MTP,
)
