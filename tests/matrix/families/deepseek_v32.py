"""DeepSeek-V3.2: DeepSeek-V3 (YaRN, expert groups) with sparse attention in every layer."""

from __future__ import annotations

from tests.matrix.case import FamilyCase
from tests.matrix.families import deepseek_v3, glm5

CASE = FamilyCase(
    name="deepseek_v32",
    config={
        **glm5.CONFIG,
        "model_type": "deepseek_v32",
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_routed_experts": 12,
        "num_experts": 12,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "max_position_embeddings": 64,
        "rope_parameters": deepseek_v3.CASE.config["rope_parameters"],
        "index_topk": 9,
        "rms_norm_eps": 1e-6,
    },
    flags=glm5.flags,
    has_experts=True,
    about="9 keys per query, YaRN beyond its original length, 2 of 4 expert groups",
)
