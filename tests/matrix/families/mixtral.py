"""Mixtral: experts in every layer, chosen by a softmax."""

from __future__ import annotations

from tests.matrix.case import SMALL, FamilyCase

CASE = FamilyCase(
    name="mixtral",
    config={
        **SMALL,
        "model_type": "mixtral",
        "intermediate_size": 28,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "pad_token_id": None,
    },
    has_experts=True,
    about="2 of 6 experts, whose weights add up to 1; 6 heads over 2 groups",
)
