"""Llama, Qwen2 and Qwen3, dense or with experts (Qwen2's with a gated shared one) in place of the MLP."""

from __future__ import annotations

from slime.backends.megatron_utils.models.rule import ModelFamily, Rule, WeightMap
from slime.backends.megatron_utils.models.shared_rules import (
    ATTENTION,
    EXPERTS,
    MLP,
    NORMS,
    ROUTER,
    TOP,
    shared_expert_rules,
)

DENSE = WeightMap(family="dense Llama, Qwen2 and Qwen3", top=TOP, layer=(*NORMS, *ATTENTION, *MLP))

SHARED_EXPERT = (
    *shared_expert_rules("shared_expert"),
    Rule("mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",)),
)

QWEN_MOE = WeightMap(
    family="Qwen2 MoE and Qwen3 MoE",
    top=TOP,
    layer=(*NORMS, *ATTENTION, *MLP, *ROUTER, *EXPERTS, *SHARED_EXPERT),
)

FAMILIES = (
    ModelFamily(model_types=("llama", "qwen2", "qwen3"), weight_map=DENSE),
    ModelFamily(model_types=("qwen2_moe", "qwen3_moe"), weight_map=QWEN_MOE),
)
