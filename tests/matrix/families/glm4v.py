"""GLM-4.1V and GLM-4.6V: GLM-4 and GLM-4.5 after a tower that interpolates its positions with cubic splines."""

from __future__ import annotations

from dataclasses import replace

from tests.matrix.case import FamilyCase
from tests.matrix.families import glm4
from tests.matrix.flags import model_flags
from tests.matrix.references.vision import as_pushed, image_adder, reference, vision_writer

VISION = {
    **{"depth": 2, "hidden_size": 24, "num_heads": 2, "in_channels": 3, "patch_size": 3, "image_size": 15},
    **{"spatial_merge_size": 2, "temporal_patch_size": 2, "intermediate_size": 40},
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}

DENSE = FamilyCase(
    name="glm4v",
    config={
        **{key: value for key, value in glm4.COMMON.items() if key not in ("head_dim", "pad_token_id")},
        "model_type": "glm4v",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 76,
        "rope_parameters": ROPE,
    },
    flags=lambda folder: model_flags(folder, "--train-vision-tower"),
    write=vision_writer({**VISION, "out_hidden_size": 64}),
    reference=reference,
    add_images=image_adder(VISION),
    about="the images of Qwen3-VL, axes one behind the other, pairs of dimensions turning; the tower trained",
)
EXPERTS = replace(
    DENSE,
    name="glm4v_moe",
    config={
        **DENSE.config,
        "model_type": "glm4v_moe",
        "hidden_size": 48,
        "num_attention_heads": 6,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "intermediate_size": 60,
        "moe_intermediate_size": 20,  # with 28 two experts of a token tie exactly after the first step
        "n_routed_experts": 12,
        "n_shared_experts": 2,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "attention_bias": True,
        "use_qk_norm": False,
    },
    write=vision_writer({**VISION, "out_hidden_size": 48}),
    pushed=as_pushed,
    has_experts=True,
    about="the same with experts chosen by sigmoid scores with a bias, and two shared ones",
)
CASES = (DENSE, EXPERTS)
