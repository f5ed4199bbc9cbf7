"""Mistral 3: Mistral in a folder with a vision tower; only the text model is trained."""

from __future__ import annotations

from dataclasses import replace

from tests.matrix.families import mistral
from tests.matrix.references.text_part import as_pushed, reference, writer

VISION = {
    **{"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "head_dim": 8, "patch_size": 4, "image_size": 16},
}

CASE = replace(
    mistral.CASE,
    name="mistral3",
    config={**mistral.CASE.config, "model_type": "mistral3"},
    write=writer("mistral", VISION),
    reference=reference,
    pushed=as_pushed,
    about="Mistral's layers in a folder with a vision tower, which the trainer goes without",
)
