"""MiniMax-M2: norms over all query heads and all key heads, half of each head rotated, experts in every layer."""

from __future__ import annotations

from tests.matrix.case import SMALL, FamilyCase

CASE = FamilyCase(
    name="minimax_m2",
    config={
        **SMALL,
        "model_type": "minimax_m2",
        "hidden_size": 40,
        "head_dim": 12,
        "rotary_dim": 6,
        "intermediate_size": 28,
        "num_local_experts": 12,
        "num_experts_per_tok": 5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rms_norm_eps": 1e-6,
        # transformers reads the fraction here; engines read the number of dimensions in rotary_dim.
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5},
        # Settings of the published config that transformers does not know.
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
    },
    has_experts=True,
    about="norms over 6 query heads and 2 key heads together, a router bias, 5 of 12 experts, 6 of 12 dimensions turn",
)
