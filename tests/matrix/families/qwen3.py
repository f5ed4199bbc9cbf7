"""Qwen3 dense: norms on queries and keys, heads wider than hidden size over heads."""

from __future__ import annotations

from tests.matrix.case import SMALL, FamilyCase

CASE = FamilyCase(
    name="qwen3",
    config={
        **SMALL,
        "model_type": "qwen3",
        "head_dim": 16,
        "intermediate_size": 80,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
    },
    about="query and key norms, 6 heads over 2 groups, head width 16 of hidden 48",
)
