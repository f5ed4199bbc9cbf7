"""gpt-oss: sinks in every softmax, windows in every other layer, biases everywhere, positions stretched by YaRN."""

from __future__ import annotations

from pathlib import Path

from tests.matrix.case import FamilyCase, read_config
from tests.matrix.flags import decoder_flags, grouped_query_flags

LEFT_OUT = ("--swiglu", "--use-rotary-position-embeddings", "--disable-bias-linear")
"""Flags of other decoders."""


def flags(folder: Path) -> list[str]:
    config = read_config(folder)
    flags = [
        *(flag for flag in decoder_flags(folder) if flag not in LEFT_OUT),
        *grouped_query_flags(folder),
        *("--add-qkv-bias", "--softmax-type", "learnable", "--position-embedding-type", "yarn"),
        *("--window-size", f"{config['sliding_window'] - 1},0", "--window-attn-skip-freq", 2),
        *("--quick-geglu", "--glu-linear-offset", 1.0),
        *("--activation-func-clamp-value", config.get("swiglu_limit", 7.0)),
        *("--num-experts", config["num_local_experts"], "--moe-ffn-hidden-size", config["intermediate_size"]),
        *("--moe-router-topk", config["num_experts_per_tok"], "--moe-router-score-function", "softmax"),
        *("--moe-router-dtype", "fp32", "--moe-token-dispatcher-type", "alltoall", "--moe-aux-loss-coeff", 0),
        *("--moe-grouped-gemm", "--expert-tensor-parallel-size", 1),
    ]
    return [str(flag) for flag in flags]


CASE = FamilyCase(
    name="gpt_oss",
    config={
        "model_type": "gpt_oss",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 32,
        "vocab_size": 131,
        "max_position_embeddings": 512,
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
        "tie_word_embeddings": False,
        "pad_token_id": None,
    },
    flags=flags,
    has_experts=True,
    has_quantized_form=False,  # SGLang loads its stacked experts in bf16 and MXFP4
    about="sinks, windows of 5 tokens in layers 1 and 3 of 3, biases, YaRN without rounding, a clamped gate",
)  # fmt: skip
