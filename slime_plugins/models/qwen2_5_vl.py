"""Qwen2.5-VL: Qwen2 with a vision tower, most of whose layers attend within windows.

Each position axis rotates a contiguous range of frequencies, time the lowest; no layer takes features of the tower.
"""

from __future__ import annotations

from dataclasses import replace

from slime.backends.megatron_utils.models.family import ModelFamily
from slime_plugins.models.shared_weights import DENSE

VISION = {
    **{"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_channels": 3},
    **{"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "window_size": 112},
}
"""``vision_config`` of the published models; the MLP width is that of 3B and 7B."""

FAMILIES = (
    ModelFamily(
        model_types=("qwen2_5_vl",),
        weight_map=replace(DENSE, family="Qwen2.5-VL", parts={"vision_model.": "visual."}),
        always={"add_qkv_bias": True},
        published={
            f"Qwen2.5-VL-{size}-Instruct": {
                "model_type": "qwen2_5_vl",
                "vision_config": {**VISION, "out_hidden_size": out, "intermediate_size": inner},
            }
            for size, out, inner in (("3B", 2048, 3420), ("7B", 3584, 3420), ("32B", 5120, 3456), ("72B", 8192, 3456))
        },
    ),
)
