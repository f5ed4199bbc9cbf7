"""gpt-oss: sinks in every softmax, windows in every other layer, biases everywhere, positions stretched by YaRN."""

from __future__ import annotations

from tests.matrix.case import SMALL, FamilyCase

CASE = FamilyCase(
    name="gpt_oss",
    config={
        **SMALL,
        "model_type": "gpt_oss",
        "hidden_size": 64,
        "num_attention_heads": 8,
        "head_dim": 16,
        "intermediate_size": 32,
        "sliding_window": 5,
        "swiglu_limit": 7.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 64,
        },
        "pad_token_id": None,
    },
    has_experts=True,
    has_quantized_form=False,  # SGLang loads its stacked experts in bf16 and MXFP4
    about="sinks, windows of 5 tokens in layers 1 and 3 of 3, biases, YaRN without rounding, a clamped gate",
)  # fmt: skip
