"""MiniMax-M2: norms over all query heads and all key heads, half of each head rotated, experts in every layer."""

from __future__ import annotations

from tests.matrix.case import FamilyCase
from tests.matrix.flags import model_flags

CASE = FamilyCase(
    name="minimax_m2",
    config={
        "model_type": "minimax_m2",
        "hidden_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "rotary_dim": 6,
        "intermediate_size": 28,
        "num_local_experts": 12,
        "num_experts_per_tok": 5,
        "vocab_size": 131,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        # transformers reads the fraction here, engines the number of dimensions in rotary_dim.
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": False,
        # What the published config says and transformers has no words for.
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
    },
    flags=model_flags,
    has_experts=True,
    about="norms over 6 query heads and 2 key heads together, a router bias, 5 of 12 experts, 6 of 12 dimensions turn",
)
