"""DeepSeek-V3 and R1: multi-latent attention, YaRN, group-limited sigmoid routing."""

from __future__ import annotations

from tests.matrix.case import SMALL, FamilyCase

CASE = FamilyCase(
    name="deepseek_v3",
    config={
        **SMALL,
        "model_type": "deepseek_v3",
        "num_hidden_layers": 5,
        "num_key_value_heads": 6,
        "q_lora_rank": 28,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 14,
        "intermediate_size": 72,
        "moe_intermediate_size": 20,
        "n_routed_experts": 12,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 2,
        "max_position_embeddings": 64,
        # YaRN's factor is small enough that all three kinds of dimensions occur, and the matrix's samples are longer
        # than the # original length.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 8.0,
            "beta_fast": 2.0,
            "beta_slow": 0.3,
            "mscale": 0.7,
            "mscale_all_dim": 1.2,
            "original_max_position_embeddings": 8,
        },
        "rms_norm_eps": 1e-5,
    },
    has_experts=True,
    about="query latents, values of another width than keys, YaRN beyond its original length, 2 of 4 expert groups",
)
