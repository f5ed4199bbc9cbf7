"""GLM-4.7-Flash: DeepSeek-V3's layout with values wider than keys, plain rotary positions and a trained MTP layer."""

from __future__ import annotations

from tests.matrix.case import SMALL, FamilyCase
from tests.matrix.flags import model_flags
from tests.matrix.references.mtp import ModelWithMtp, mtp_extra_loss, mtp_flags, write_with_mtp

CASE = FamilyCase(
    name="glm4_moe_lite",
    config={
        **SMALL,
        "model_type": "glm4_moe_lite",
        "hidden_size": 40,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 10,
        "num_key_value_heads": 10,
        "q_lora_rank": 18,
        "kv_lora_rank": 22,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 18,
        "intermediate_size": 64,
        "moe_intermediate_size": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "vocab_size": 137,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "rms_norm_eps": 1e-5,
    },
    flags=lambda folder: model_flags(folder, *mtp_flags(folder)),
    write=write_with_mtp,
    reference=ModelWithMtp,
    extra_loss=mtp_extra_loss,
    has_experts=True,
    about="values wider than keys, no scaling factor anywhere, 4 of 8 experts, MTP",
)
