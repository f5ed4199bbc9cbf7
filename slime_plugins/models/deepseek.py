"""DeepSeek-V3 and models with its layout: R1, Kimi-K2 (the text model of 2.5), Moonlight, GLM-4.7-Flash.

Multi-latent attention, dense layers first, then experts with a biased sigmoid router, and shared experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slime.backends.megatron_utils.models.family import BLOCK_FP8, ModelFamily
from slime.utils.files import language_config
from slime_plugins.models.shared_flags import SIGMOID
from slime_plugins.models.shared_weights import LATENT_MOE, TEXT_PART

DEEPSEEK = replace(LATENT_MOE, family="DeepSeek-V3 and models laid out like it")


def text_alone(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's part of a config.json for which transformers has no class."""
    return {**language_config(dict(config)), "text_config": None}


_FP8 = {"model_type": "deepseek_v3", "quantization_config": BLOCK_FP8}
_INT4 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
}

FAMILIES = (
    ModelFamily(
        model_types=("deepseek_v3", "kimi_k2", "glm4_moe_lite"),
        config_class="deepseek_v3",
        weight_map=DEEPSEEK,
        always=SIGMOID,
        num_experts_key="n_routed_experts",
        published={
            "DeepSeek-R1": _FP8,
            "DeepSeek-V3": _FP8,
            "Kimi-K2-Instruct": {"quantization_config": BLOCK_FP8},
            "Kimi-K2-Thinking": {"quantization_config": _INT4},
        },
    ),
    ModelFamily(
        model_types=("kimi_k25",),
        config_class="deepseek_v3",
        spelled_out=text_alone,
        weight_map=replace(DEEPSEEK, family="Kimi-K2.5 (text)", **TEXT_PART),
        always=SIGMOID,
        num_experts_key="n_routed_experts",
        published={"Kimi-K2.5": {"model_type": "kimi_k25", "quantization_config": _INT4}},
    ),
)
