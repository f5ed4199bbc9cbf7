"""GLM-5 and GLM-5.2: sparse attention, in GLM-5.2 with keys shared across layers."""

from __future__ import annotations

from pathlib import Path

from tests.matrix.case import SMALL, FamilyCase
from tests.matrix.flags import model_flags
from tests.matrix.references.mtp import ModelWithMtp, mtp_extra_loss, mtp_flags, write_with_mtp

SPARSE = ("--spec", "slime_plugins.models.glm5.glm5", "get_glm5_spec", "--allgather-cp")


def flags(folder: Path) -> list[str]:
    return model_flags(folder, "--allgather-cp")


CONFIG = {
    **SMALL,
    "model_type": "glm_moe_dsa",
    "num_key_value_heads": 6,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "intermediate_size": 72,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    # Rows of the tests have up to 65 keys.  With 16 heads no two scores are equal, and few are zero.
    "index_topk": 7,
    "index_n_heads": 16,
    "index_head_dim": 20,
    "rms_norm_eps": 1e-5,
}

CASES = (
    FamilyCase(
        name="glm5",
        config={**CONFIG, "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
        flags=lambda folder: [*flags(folder), *mtp_flags(folder)],
        write=write_with_mtp,
        reference=ModelWithMtp,
        extra_loss=mtp_extra_loss,
        has_experts=True,
        about="7 keys per query of up to 65; 8 of 20 dimensions of an indexer's head turn; an MTP layer, trained",
    ),
    FamilyCase(
        name="glm5_2",
        config={
            **CONFIG,
            "num_hidden_layers": 7,
            "first_k_dense_replace": 2,
            "index_topk_freq": 4,
            "index_skip_topk_offset": 3,
        },
        flags=flags,
        has_experts=True,
        about="as glm5; layers 4 to 6 of 7 attend to the keys that layer 3 chose",
    ),
)
