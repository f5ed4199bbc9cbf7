"""Qwen3 MoE: softmax over the chosen experts, a layer without experts among them; Qwen2 MoE: a gated shared expert."""

from __future__ import annotations

from pathlib import Path

from tests.matrix.case import FamilyCase, read_config
from tests.matrix.flags import decoder_flags, grouped_query_flags


def flags(folder: Path) -> list[str]:
    config = read_config(folder)
    has_experts = [
        int(index not in config["mlp_only_layers"] and (index + 1) % config["decoder_sparse_step"] == 0)
        for index in range(config["num_hidden_layers"])
    ]
    flags = [
        *decoder_flags(folder),
        *grouped_query_flags(folder),
        *("--num-experts", config.get("num_experts") or config["num_local_experts"]),
        *("--moe-layer-freq", has_experts, "--moe-ffn-hidden-size", config["moe_intermediate_size"]),
        *("--moe-router-topk", config["num_experts_per_tok"], "--moe-router-score-function", "softmax"),
        *("--moe-router-dtype", "fp32", "--moe-token-dispatcher-type", "alltoall", "--moe-aux-loss-coeff", 0),
        *("--moe-token-drop-policy", "probs", "--moe-grouped-gemm", "--moe-permute-fusion"),
    ]
    if not config["norm_topk_prob"]:
        flags.append("--moe-router-pre-softmax")  # weights as they are among all experts
    if config["model_type"] == "qwen3_moe":
        flags.append("--qk-layernorm")
    else:
        flags += ["--add-qkv-bias", "--moe-shared-expert-gate"]
        flags += ["--moe-shared-expert-intermediate-size", config["shared_expert_intermediate_size"]]
    return [str(flag) for flag in flags]


COMMON = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
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
        flags=flags,
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
        flags=flags,
        has_experts=True,
        about="a gated shared expert, weights not normalised, biases on q, k, v",
    ),
)
