"""Seed-OSS: Qwen2's layers with heads of any width."""

from __future__ import annotations

from tests.matrix.case import FamilyCase
from tests.matrix.flags import model_flags

CASE = FamilyCase(
    name="seed_oss",
    config={
        "model_type": "seed_oss",
        "hidden_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 72,
        "vocab_size": 131,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0},
        "attention_bias": True,
        "attention_out_bias": False,
        "tie_word_embeddings": False,
    },
    flags=model_flags,
    about="biases on q, k, v; heads wider than hidden size over heads",
)
