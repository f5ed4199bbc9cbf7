"""What the config.json of published checkpoints says that the model flags do not.

A recipe names folders of the cluster; a laptop has none of them.  For checkpoints in this table the plan goes by what
is written here, and says so; for others by the flags alone.  ``--hf-checkpoint FOLDER`` with a config.json of the
real thing is always better.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

_BLOCK_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_GLM_MOE_DSA: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
}
_GLM_52: dict[str, Any] = {**_GLM_MOE_DSA, "index_topk_freq": 4, "index_skip_topk_offset": 3}

_MINIMAX_M2: dict[str, Any] = {
    "model_type": "minimax_m2",
    "use_qk_norm": True,
    "use_routing_bias": True,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "quantization_config": _BLOCK_FP8,
}
_INT4 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
}

_QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
}


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    }


KNOWN: dict[str, dict[str, Any]] = {
    "DeepSeek-R1": {"model_type": "deepseek_v3", "quantization_config": _BLOCK_FP8},
    "DeepSeek-V3": {"model_type": "deepseek_v3", "quantization_config": _BLOCK_FP8},
    "GLM-5": _GLM_MOE_DSA,
    "GLM-5-FP8": {**_GLM_MOE_DSA, "quantization_config": _BLOCK_FP8},
    "GLM-5.2": _GLM_52,
    "GLM-5.2-FP8": {**_GLM_52, "quantization_config": _BLOCK_FP8},
    "Kimi-K2-Instruct": {"quantization_config": _BLOCK_FP8},
    "Kimi-K2-Thinking": {"quantization_config": _INT4},
    "Llama-3.1-8B-Instruct": _llama3(8.0),
    "Llama-3.2-1B-Instruct": _llama3(32.0),
    "Llama-3.2-3B-Instruct": _llama3(32.0),
    "MiniMax-M2": _MINIMAX_M2,
    "Qwen3-Next-80B-A3B-Instruct": _QWEN3_NEXT,
    "Qwen3-Next-80B-A3B-Instruct-FP8": {**_QWEN3_NEXT, "quantization_config": _BLOCK_FP8},
    "Qwen3-Next-80B-A3B-Thinking": _QWEN3_NEXT,
    "Qwen3-Next-80B-A3B-Thinking-FP8": {**_QWEN3_NEXT, "quantization_config": _BLOCK_FP8},
    "GLM-4.5-355B-A32B-FP8": {"model_type": "glm4_moe", "quantization_config": _BLOCK_FP8},
}


def assumed_config(checkpoint: str) -> dict[str, Any]:
    """Return the known config of a checkpoint by the name of its folder; empty when there is none."""
    return KNOWN.get(PurePath(checkpoint).name, {})
