"""Llama, Qwen2 and Qwen3, dense or with experts (Qwen2's with a gated shared one) in place of the MLP."""

from __future__ import annotations

from typing import Any

from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.rule import Rule, WeightMap
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


def _llama3(factor: float) -> dict[str, Any]:
    """Return the rotary settings of a Llama 3 whose positions are stretched by ``factor``."""
    return {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    }


FAMILIES = (
    ModelFamily(
        model_types=("llama",),
        weight_map=DENSE,
        published={
            "Llama-3.1-8B-Instruct": _llama3(8.0),
            "Llama-3.2-1B-Instruct": _llama3(32.0),
            "Llama-3.2-3B-Instruct": _llama3(32.0),
        },
    ),
    ModelFamily(model_types=("qwen2", "qwen3"), weight_map=DENSE),
    ModelFamily(model_types=("qwen2_moe", "qwen3_moe"), weight_map=QWEN_MOE),
)
