"""Qwen3-VL, dense or with experts: Qwen3 with a vision tower, and positions in time, height and width.

Published folders stack the experts of a layer in one tensor, transposed (``slime.weights.stacked_experts``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.flag_rules import Config, hf_rope_settings
from slime_plugins.models.shared_flags import NO_BIASES, SOFTMAX
from slime_plugins.models.shared_weights import COMPOSITE, DENSE, SOFTMAX_MOE

QWEN3_VL = replace(DENSE, family="Qwen3-VL", **COMPOSITE)
QWEN3_VL_MOE = replace(SOFTMAX_MOE, family="Qwen3-VL MoE", **COMPOSITE)


def interleaved_only(config: Config) -> Iterator[str]:
    """Yield a message for the positions of older models, whose axes are not interleaved."""
    if hf_rope_settings(config).get("mrope_interleaved") is False:
        yield "mrope_interleaved is False; the axes of positions are interleaved here"


TOWER = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "in_channels": 3, "patch_size": 16,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
"""``vision_config`` of the published models from 8B on, which differ only in the language model's width."""
SMALL_TOWER = {
    **TOWER, "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17],
}  # fmt: skip

FAMILIES = (
    ModelFamily(
        model_types=("qwen3_vl",),
        weight_map=QWEN3_VL,
        always={"qk_layernorm": True},
        fixed=NO_BIASES,
        flags=interleaved_only,
        published={
            f"Qwen3-VL-{size}-{kind}": {"model_type": "qwen3_vl", "vision_config": tower}
            for size, tower in {
                "2B": {**SMALL_TOWER, "out_hidden_size": 2048},
                "4B": {**SMALL_TOWER, "out_hidden_size": 2560},
                "8B": {**TOWER, "out_hidden_size": 4096},
                "32B": {**TOWER, "out_hidden_size": 5120},
            }.items()
            for kind in ("Instruct", "Thinking")
        },
    ),
    ModelFamily(
        model_types=("qwen3_vl_moe",),
        weight_map=QWEN3_VL_MOE,
        always={**SOFTMAX, "qk_layernorm": True},
        defaults={"norm_topk_prob": True},
        fixed={**NO_BIASES, "norm_topk_prob": True},
        flags=interleaved_only,
        published={
            f"Qwen3-VL-{size}-{kind}": {
                "model_type": "qwen3_vl_moe",
                "vision_config": {**TOWER, "out_hidden_size": out},
            }
            for size, out in (("30B-A3B", 2048), ("235B-A22B", 4096))
            for kind in ("Instruct", "Thinking")
        },
    ),
)
