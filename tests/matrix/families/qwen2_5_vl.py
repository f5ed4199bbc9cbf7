"""Qwen2.5-VL: Qwen2 with position axes one after the other, and a tower that attends within windows."""

from __future__ import annotations

from tests.matrix.case import SMALL, FamilyCase
from tests.matrix.flags import model_flags
from tests.matrix.references.vision import image_adder, reference, vision_writer

VISION = {
    **{"depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "in_channels": 3, "patch_size": 3},
    **{"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 48},
    **{"window_size": 12, "fullatt_block_indexes": [1]},  # two by two tokens
}

CASE = FamilyCase(
    name="qwen2_5_vl",
    config={
        **SMALL,
        "model_type": "qwen2_5_vl",
        "num_attention_heads": 4,
        "intermediate_size": 72,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 2, 2]},
        "tie_word_embeddings": True,
    },
    flags=lambda folder: model_flags(folder, "--train-vision-tower"),
    write=vision_writer(VISION),
    reference=reference,
    add_images=image_adder(VISION),
    about="the images of Qwen3-VL, windows of 2 by 2 tokens in two of the tower's three layers; the tower trained",
)
