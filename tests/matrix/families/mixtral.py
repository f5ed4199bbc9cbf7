"""Mixtral: experts in every layer, chosen by a softmax."""

from __future__ import annotations

from tests.matrix.case import FamilyCase
from tests.matrix.flags import model_flags

CASE = FamilyCase(
    name="mixtral",
    config={
        "model_type": "mixtral",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 28,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "vocab_size": 131,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "pad_token_id": None,
    },
    flags=model_flags,
    has_experts=True,
    about="2 of 6 experts, whose weights add up to 1; 6 heads over 2 groups",
)
