"""Llama 3: as published (an untied 3.1 with scaled rotary frequencies) and with ungrouped heads."""

from __future__ import annotations

from tests.matrix.case import FamilyCase

COMMON = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "intermediate_size": 56,
    "vocab_size": 131,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}

CASES = (
    FamilyCase(
        name="llama3",
        config={
            **COMMON,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            "max_position_embeddings": 16384,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        about="rotary frequencies scaled as in Llama 3.1",
    ),
    FamilyCase(
        name="llama3-plain",
        config={
            **COMMON,
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "tie_word_embeddings": True,
            "max_position_embeddings": 512,
        },
        max_tp=1,
        about="5 heads, none grouped; tied embeddings",
    ),
)
