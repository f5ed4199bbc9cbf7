"""Qwen3-VL, dense (2B to 32B): Qwen3 with positions in time, height and width, and a vision tower in front."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.flag_rules import NO_BIASES, Config
from slime.backends.megatron_utils.models.qwen import DENSE
from slime.backends.megatron_utils.models.qwen3_5 import TOP
from slime.backends.megatron_utils.models.rotary_rules import hf_rope_settings

QWEN3_VL = replace(
    DENSE,
    family="Qwen3-VL",
    top=TOP,
    layer_prefix="model.language_model.layers.{layer}.",
    tower="model.visual.",
)


def interleaved_only(config: Config) -> Iterator[str]:
    """Refuse the positions of older models, whose axes are not interleaved."""
    if hf_rope_settings(config).get("mrope_interleaved") is False:
        yield "mrope_interleaved is False; the axes of positions are interleaved here"


FAMILIES = (
    ModelFamily(
        # The name with _text is that of text_config.
        model_types=("qwen3_vl", "qwen3_vl_text"),
        weight_map=QWEN3_VL,
        always={"qk_layernorm": True},
        class_defaults={"head_dim": 128, "rope_theta": 500000.0},
        fixed=NO_BIASES,
        flags=interleaved_only,
        published={
            f"Qwen3-VL-{size}-{kind}": {"model_type": "qwen3_vl"}
            for size in ("2B", "4B", "8B", "32B")
            for kind in ("Instruct", "Thinking")
        },
    ),
)
