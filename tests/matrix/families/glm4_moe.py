"""GLM-4.5, 4.6 and 4.7: sigmoid routing with a bias, shared experts, dense layers first, half of each head rotated,
an MTP layer."""

from __future__ import annotations

from tests.matrix.case import SMALL, FamilyCase
from tests.matrix.flags import model_flags
from tests.matrix.references.mtp import ModelWithMtp, mtp_extra_loss, mtp_flags, write_with_mtp

COMMON = {
    **SMALL,
    "model_type": "glm4_moe",
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
    "attention_bias": True,
    "norm_topk_prob": True,
}

CASES = (
    FamilyCase(
        name="glm4_moe",
        config={
            **COMMON,
            "num_hidden_layers": 5,
            "num_nextn_predict_layers": 1,
            "first_k_dense_replace": 2,
            "intermediate_size": 76,
            "moe_intermediate_size": 20,
            "n_routed_experts": 12,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": True,
        },
        flags=lambda folder: model_flags(folder, *mtp_flags(folder)),
        write=write_with_mtp,
        reference=ModelWithMtp,
        extra_loss=mtp_extra_loss,
        has_experts=True,
        about="as the 355B: query and key norms, biases on q, k, v, router bias, weights scaled by 2.5; trained MTP",
    ),
    FamilyCase(
        name="glm4_moe-groups",
        config={
            **COMMON,
            "num_hidden_layers": 3,
            "num_nextn_predict_layers": 1,
            "first_k_dense_replace": 1,
            "intermediate_size": 60,
            "moe_intermediate_size": 28,
            "n_routed_experts": 12,
            "n_shared_experts": 2,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.0,
            "n_group": 3,
            "topk_group": 2,
            "use_qk_norm": False,
        },
        flags=lambda folder: model_flags(folder, *mtp_flags(folder, is_trained=False)),
        write=write_with_mtp,
        reference=ModelWithMtp,
        has_experts=True,
        about="as the 106B, without query norms; experts chosen within groups; two shared experts; frozen MTP",
    ),
)
