"""Megatron flags that many families share, read off the ``config.json`` of a tiny checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.matrix.case import read_config


def text_config(folder: Path) -> dict[str, Any]:
    """``config.json``, the language model's part laid over it."""
    config = read_config(folder)
    return config | config.get("text_config", {})


def rope_setting(config: dict[str, Any], name: str, default: Any = None) -> Any:
    """A rotary setting: transformers 5 keeps it under ``rope_parameters``, older configs at the top.

    Of models whose layers differ, that of full attention.
    """
    by_layer = (config.get("rope_parameters") or {}).get("full_attention")
    for holder in (config.get("rope_parameters"), by_layer, config.get("rope_scaling"), config):
        if isinstance(holder, dict) and holder.get(name) is not None:
            return holder[name]
    return default


def decoder_flags(folder: Path) -> list[str]:
    """Sizes, norms, rotary base and vocabulary of a decoder with a gated MLP; attention is the family's to add."""
    config = text_config(folder)
    flags: list[Any] = [
        *("--num-layers", config["num_hidden_layers"], "--hidden-size", config["hidden_size"]),
        *(
            "--ffn-hidden-size",
            config.get("intermediate_size") or config["moe_intermediate_size"],
            "--num-attention-heads",
            config["num_attention_heads"],
        ),
        *("--vocab-size", config["vocab_size"], "--make-vocab-size-divisible-by", 8),
        *("--rotary-base", rope_setting(config, "rope_theta"), "--norm-epsilon", config["rms_norm_eps"]),
        *("--swiglu", "--use-rotary-position-embeddings", "--disable-bias-linear", "--normalization", "RMSNorm"),
    ]
    if not config.get("tie_word_embeddings"):
        flags.append("--untie-embeddings-and-output-weights")
    return [str(flag) for flag in flags]


def grouped_query_flags(folder: Path) -> list[str]:
    """Key heads and head width of grouped-query attention."""
    config = text_config(folder)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    flags = ["--group-query-attention", "--num-query-groups", config["num_key_value_heads"]]
    return [str(flag) for flag in [*flags, "--kv-channels", head_dim]]


def latent_attention_flags(folder: Path) -> list[str]:
    """Widths of multi-latent attention.  What YaRN needs is left to be read from the checkpoint's config."""
    config = read_config(folder)
    flags = [
        *("--multi-latent-attention", "--qk-layernorm", "--kv-lora-rank", config["kv_lora_rank"]),
        *("--qk-head-dim", config["qk_nope_head_dim"], "--qk-pos-emb-head-dim", config["qk_rope_head_dim"]),
        *("--v-head-dim", config["v_head_dim"], "--kv-channels", config["qk_nope_head_dim"]),
    ]
    if config.get("q_lora_rank") is not None:
        flags += ["--q-lora-rank", config["q_lora_rank"]]
    return [str(flag) for flag in flags]


def deepseek_expert_flags(folder: Path) -> list[str]:
    """Dense layers first, then routed experts behind a sigmoid router with a bias, and shared experts."""
    config = read_config(folder)
    num_layers = config["num_hidden_layers"]
    kinds = config.get("mlp_layer_types")
    num_dense = kinds.count("dense") if kinds else config["first_k_dense_replace"]
    flags = [
        *("--num-experts", config["n_routed_experts"], "--moe-router-topk", config["num_experts_per_tok"]),
        *("--moe-layer-freq", f"[0]*{num_dense}+[1]*{num_layers - num_dense}"),
        *("--moe-ffn-hidden-size", config["moe_intermediate_size"]),
        *("--moe-shared-expert-intermediate-size", config["moe_intermediate_size"] * config["n_shared_experts"]),
        *("--moe-router-score-function", "sigmoid", "--moe-router-pre-softmax", "--moe-router-enable-expert-bias"),
        *("--moe-router-bias-update-rate", 0, "--moe-router-load-balancing-type", "seq_aux_loss"),
        *("--moe-router-topk-scaling-factor", config["routed_scaling_factor"], "--moe-router-dtype", "fp32"),
        *("--moe-aux-loss-coeff", 0, "--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm"),
    ]
    if config.get("n_group"):
        flags += ["--moe-router-num-groups", config["n_group"], "--moe-router-group-topk", config["topk_group"]]
    return [str(flag) for flag in flags]
