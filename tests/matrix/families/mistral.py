"""Mistral: Llama's layers under a name of their own, without its windows."""

from __future__ import annotations

from tests.matrix.case import FamilyCase
from tests.matrix.flags import model_flags

CASE = FamilyCase(
    name="mistral",
    config={
        "model_type": "mistral",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 72,
        "vocab_size": 131,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "pad_token_id": None,
    },
    flags=model_flags,
    about="heads wider than hidden size over heads, no biases and no norms in attention",
)
