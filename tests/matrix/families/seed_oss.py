"""Seed-OSS: Qwen2's layers with heads of any width."""

from __future__ import annotations

from tests.matrix.case import SMALL, FamilyCase

CASE = FamilyCase(
    name="seed_oss",
    config={
        **SMALL,
        "model_type": "seed_oss",
        "hidden_size": 40,
        "head_dim": 16,
        "intermediate_size": 72,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0},
        "attention_bias": True,
        "attention_out_bias": False,
    },
    about="biases on q, k, v; heads wider than hidden size over heads",
)
