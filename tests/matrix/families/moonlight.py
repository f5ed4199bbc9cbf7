"""Moonlight: DeepSeek-V3's layout (and model type) without a query latent, with plain rotary positions."""

from __future__ import annotations

from tests.matrix.case import SMALL, FamilyCase

CASE = FamilyCase(
    name="moonlight",
    config={
        **SMALL,
        "model_type": "deepseek_v3",
        "hidden_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 6,
        "v_head_dim": 16,
        "intermediate_size": 56,
        "moe_intermediate_size": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "vocab_size": 133,
        "rope_theta": 50000.0,
        "rms_norm_eps": 1e-5,
    },
    has_experts=True,
    about="queries straight from the hidden state, two shared experts, one expert group, 3 of 8 experts",
)
