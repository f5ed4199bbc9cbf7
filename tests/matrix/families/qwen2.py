"""Qwen2.5: biases on queries, keys and values, tied embeddings."""

from __future__ import annotations

from tests.matrix.case import SMALL, FamilyCase

CASE = FamilyCase(
    name="qwen2.5",
    config={
        **SMALL,
        "model_type": "qwen2",
        "intermediate_size": 72,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    about="biases on q, k, v; tied embeddings",
)
