"""Mistral: Llama's layers under another name, without its windows."""

from __future__ import annotations

from tests.matrix.case import SMALL, FamilyCase

CASE = FamilyCase(
    name="mistral",
    config={
        **SMALL,
        "model_type": "mistral",
        "num_attention_heads": 4,
        "head_dim": 16,
        "intermediate_size": 72,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "pad_token_id": None,
    },
    about="heads wider than hidden size over heads, no biases and no norms in attention",
)
