"""Qwen3 dense: norms on queries and keys, heads wider than hidden size over heads."""

from __future__ import annotations

from tests.matrix.case import FamilyCase
from tests.matrix.flags import model_flags

CASE = FamilyCase(
    name="qwen3",
    config={
        "model_type": "qwen3",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 80,
        "vocab_size": 131,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    flags=model_flags,
    about="query and key norms, 6 heads over 2 groups, head width 16 of hidden 48",
)
