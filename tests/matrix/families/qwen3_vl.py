"""Qwen3-VL, dense and with experts: images of many sizes in the prompts; features of the tower in the first layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.matrix.case import FamilyCase
from tests.matrix.families import qwen3, qwen3_moe
from tests.matrix.flags import model_flags
from tests.matrix.references.vision import as_pushed, image_adder, reference, transpose_stacks, vision_writer

VISION = {
    **{"depth": 4, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "in_channels": 3, "patch_size": 3},
    **{"spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 25, "out_hidden_size": 48},
    "deepstack_visual_indexes": [1, 2],
}


def _seeing(text: FamilyCase, kind: str) -> dict[str, Any]:
    """The config of a text model with positions in three axes."""
    return {
        **{key: value for key, value in text.config.items() if key != "rope_theta"},
        "model_type": kind,
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 10000.0},
            **{"mrope_section": [3, 3, 2], "mrope_interleaved": True},
        },
    }


CASE = FamilyCase(
    name="qwen3_vl",
    config=_seeing(qwen3.CASE, "qwen3_vl"),
    flags=lambda folder: model_flags(folder, "--train-vision-tower"),
    write=vision_writer(VISION),
    reference=reference,
    add_images=image_adder(VISION),
    about="18 images in 9 prompts, 1 to 15 tokens each; features of the tower in 2 layers; the tower trained",
)
EXPERTS = replace(
    CASE,
    name="qwen3_vl_moe",
    config=_seeing(qwen3_moe.CASES[0], "qwen3_vl_moe"),
    write=vision_writer(VISION, transpose_stacks),
    pushed=as_pushed,
    has_experts=True,
    about="the same with 12 experts, 3 chosen, stacked in the folder and transposed; a dense layer between",
)
CASES = (CASE, EXPERTS)
