"""Qwen2 MoE (with a gated shared expert) and Qwen3 MoE: the dense layer's attention, experts in place of the MLP."""

from __future__ import annotations

from slime.backends.megatron_utils.weight_maps.dense import ATTENTION, MLP, NORMS, TOP
from slime.backends.megatron_utils.weight_maps.moe import EXPERTS, ROUTER, shared_expert_rules
from slime.backends.megatron_utils.weight_maps.rule import Rule, WeightMap

SHARED_EXPERT = (
    *shared_expert_rules("shared_expert"),
    Rule("mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",)),
)

QWEN_MOE = WeightMap(
    family="Qwen2 MoE and Qwen3 MoE",
    top=TOP,
    layer=(*NORMS, *ATTENTION, *MLP, *ROUTER, *EXPERTS, *SHARED_EXPERT),
)
