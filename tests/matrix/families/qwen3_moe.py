"""Qwen3 MoE: softmax over the chosen experts, a layer without experts among them; Qwen2 MoE: a gated shared expert."""

from __future__ import annotations

from tests.matrix.case import SMALL, FamilyCase

COMMON = {
    **SMALL,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}

CASES = (
    FamilyCase(
        name="qwen3_moe",
        config={
            **COMMON,
            "model_type": "qwen3_moe",
            "head_dim": 16,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "intermediate_size": 88,
            "moe_intermediate_size": 20,
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
        has_experts=True,
        about="12 experts, 3 chosen, a dense layer between; query and key norms",
    ),
    FamilyCase(
        name="qwen2_moe",
        config={
            **COMMON,
            "model_type": "qwen2_moe",
            "num_hidden_layers": 3,
            "decoder_sparse_step": 2,
            "intermediate_size": 72,
            "moe_intermediate_size": 28,
            "shared_expert_intermediate_size": 44,
            "num_experts": 10,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
        },
        has_experts=True,
        about="a gated shared expert, weights not normalised, biases on q, k, v",
    ),
)
