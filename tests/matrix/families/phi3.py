"""Phi-4: Llama with fused projections."""

from __future__ import annotations

from tests.matrix.case import SMALL, FamilyCase

CASE = FamilyCase(
    name="phi3",
    config={
        **SMALL,
        "model_type": "phi3",
        "intermediate_size": 76,
        "rms_norm_eps": 1e-5,
        "rope_theta": 250000.0,
        "sliding_window": None,
        "pad_token_id": None,
    },
    about="queries, keys and values in one tensor, gate and up in another; 6 heads over 2 groups",
)
