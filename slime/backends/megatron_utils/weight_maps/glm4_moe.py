"""GLM-4.5, 4.6 and 4.7: experts chosen by sigmoid scores with a bias, shared experts, an MTP layer."""

from __future__ import annotations

from slime.backends.megatron_utils.weight_maps.dense import ATTENTION, MLP, NORMS, TOP
from slime.backends.megatron_utils.weight_maps.moe import EXPERTS, ROUTER, ROUTER_BIAS, shared_expert_rules
from slime.backends.megatron_utils.weight_maps.mtp import MTP, MTP_COPIES
from slime.backends.megatron_utils.weight_maps.rule import WeightMap

GLM4_MOE = WeightMap(
    family="GLM-4.5, 4.6 and 4.7",
    top=TOP,
    layer=(*NORMS, *ATTENTION, *MLP, *ROUTER, *ROUTER_BIAS, *EXPERTS, *shared_expert_rules("shared_experts")),
    mtp=MTP,
    mtp_copies=MTP_COPIES,
)
