"""GLM-4 and GLM-Z1: norms on both sides, half of each head rotated in interleaved pairs, gate and up in one tensor."""

from __future__ import annotations

from tests.matrix.case import FamilyCase
from tests.matrix.flags import model_flags

SPEC = ("--spec", "slime_plugins.models.glm4", "get_glm_spec")
COMMON = {
    "model_type": "glm4",
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "head_dim": 16,
    "vocab_size": 131,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "tie_word_embeddings": False,
    "pad_token_id": None,
}

CASES = (
    FamilyCase(
        name="glm4",
        config={**COMMON, "num_key_value_heads": 2, "intermediate_size": 76, "attention_bias": True},
        flags=lambda folder: model_flags(folder, *SPEC),
        about="as the 9B: norms behind attention and MLP, biases on q, k, v, interleaved rotary over half a head",
    ),
    FamilyCase(
        name="glm4-32b",
        config={
            **COMMON,
            "num_key_value_heads": 6,
            "head_dim": 12,
            "num_hidden_layers": 5,
            "intermediate_size": 92,
            "attention_bias": False,
        },
        about="as the 32B, without biases; the norms asked for by their flags, without --spec",
    ),
)
