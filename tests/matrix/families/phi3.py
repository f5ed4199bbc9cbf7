"""Phi-4: Llama with fused projections."""

from __future__ import annotations

from tests.matrix.case import FamilyCase
from tests.matrix.flags import model_flags

CASE = FamilyCase(
    name="phi3",
    config={
        "model_type": "phi3",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 76,
        "vocab_size": 131,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 250000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "pad_token_id": None,
    },
    flags=model_flags,
    about="queries, keys and values in one tensor, gate and up in another; 6 heads over 2 groups",
)
