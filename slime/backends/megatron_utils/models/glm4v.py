"""GLM-4.1V and GLM-4.6V-Flash, dense; GLM-4.5V and GLM-4.6V, with experts: GLM-4 and GLM-4.5 behind a vision tower.

Each axis of positions turns a run of frequencies, time the lowest; the layers take nothing of the tower.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.flag_rules import PLAIN, SIGMOID, Config
from slime.backends.megatron_utils.models.glm4 import GLM4, GLM4_MOE, HALF_TURNS, SANDWICH
from slime.backends.megatron_utils.models.shared_rules import COMPOSITE_LAYER, COMPOSITE_TOP

_COMPOSITE: dict[str, Any] = {
    "top": COMPOSITE_TOP,
    "layer_prefix": COMPOSITE_LAYER,
    "mtp_prefix": lambda index, shape: COMPOSITE_LAYER.format(layer=shape.num_layers + index),
    "tower": "model.visual.",
}


def tower_parameters(vision: Config) -> int:
    """Return the parameters of the vision tower: patches, positions, blocks, and what merges and projects patches."""
    hidden, out = vision["hidden_size"], vision["out_hidden_size"]
    patch = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    block = 4 * hidden * hidden + 3 * hidden * out + 2 * hidden + 3 * hidden * bool(vision.get("attention_bias"))
    positions = (vision["image_size"] // vision["patch_size"]) ** 2
    merger = out * out + 2 * out + 3 * out * vision["intermediate_size"]
    downsample = out * (hidden * vision["spatial_merge_size"] ** 2 + 1)
    return int(vision["depth"] * block + hidden * (patch + positions + 3) + downsample + merger)


_TOWER: dict[str, Any] = {
    "tower_parameters": tower_parameters,
    "tower_ffn_key": "out_hidden_size",
    "rotary_section": (8, 12, 12),
    "has_interleaved_axes": False,
}

VISION = {
    "depth": 24, "hidden_size": 1536, "num_heads": 12, "in_channels": 3, "image_size": 336, "patch_size": 14,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 4096,
}  # fmt: skip
"""``vision_config`` of the published models; what they differ in is the width of the merger."""

FAMILIES = (
    ModelFamily(
        # The names with _text are those of text_config.
        model_types=("glm4v", "glm4v_text"),
        weight_map=replace(GLM4, family="GLM-4V", **_COMPOSITE),
        always={**SANDWICH, "add_qkv_bias": True},
        fixed={**PLAIN, "attention_bias": True},
        published={
            name: {"model_type": "glm4v", "vision_config": {**VISION, "intermediate_size": 13696}}
            for name in ("GLM-4.1V-9B-Thinking", "GLM-4.6V-Flash")
        },
        **_TOWER,
    ),
    ModelFamily(
        model_types=("glm4v_moe", "glm4v_moe_text"),
        weight_map=replace(GLM4_MOE, family="GLM-4V MoE", **_COMPOSITE),
        always=SIGMOID,
        class_defaults={**HALF_TURNS, "attention_bias": True},
        fixed={**PLAIN, "use_qk_norm": False},
        num_experts_key="n_routed_experts",
        published={
            name: {"model_type": "glm4v_moe", "vision_config": {**VISION, "intermediate_size": 10944}}
            for name in ("GLM-4.5V", "GLM-4.6V")
        },
        **_TOWER,
    ),
)
