"""Qwen2.5: biases on queries, keys and values, tied embeddings."""

from __future__ import annotations

from tests.matrix.case import FamilyCase
from tests.matrix.flags import model_flags

CASE = FamilyCase(
    name="qwen2.5",
    config={
        "model_type": "qwen2",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 72,
        "vocab_size": 131,
        "max_position_embeddings": 512,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    flags=model_flags,
    about="biases on q, k, v; tied embeddings",
)
