"""Llama, Mistral, Qwen2 and Qwen3: dense, or with experts (in Qwen2 with a gated shared expert)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.flag_rules import PLAIN
from slime_plugins.models.shared_flags import NO_BIASES, SOFTMAX, window_is_idle
from slime_plugins.models.shared_weights import DENSE, SOFTMAX_MOE

QWEN = replace(DENSE, family="dense Llama, Mistral, Qwen2 and Qwen3")
QWEN_MOE = replace(SOFTMAX_MOE, family="Qwen2 MoE and Qwen3 MoE")


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
        weight_map=QWEN,
        fixed=NO_BIASES,
        published={
            "Llama-3.1-8B-Instruct": _llama3(8.0),
            "Llama-3.2-1B-Instruct": _llama3(32.0),
            "Llama-3.2-3B-Instruct": _llama3(32.0),
        },
    ),
    ModelFamily(model_types=("mistral",), weight_map=QWEN, fixed=NO_BIASES, flags=window_is_idle),
    ModelFamily(model_types=("qwen2",), weight_map=QWEN, always={"add_qkv_bias": True}),
    ModelFamily(
        model_types=("qwen3",),
        weight_map=QWEN,
        always={"qk_layernorm": True},
        fixed=NO_BIASES,
    ),
    ModelFamily(
        model_types=("qwen2_moe",),
        weight_map=QWEN_MOE,
        always={**SOFTMAX, "moe_shared_expert_gate": True, "add_qkv_bias": True},
        fixed={**PLAIN, "qkv_bias": True},
        # They would include its shared expert, which SGLang's adapters assume to be as wide as a dense MLP.
        engine_without_adapters=("gate_proj", "up_proj", "down_proj"),
    ),
    ModelFamily(
        model_types=("qwen3_moe",),
        weight_map=QWEN_MOE,
        always={**SOFTMAX, "qk_layernorm": True},
        fixed=NO_BIASES,
    ),
)
