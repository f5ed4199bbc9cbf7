"""Megatron flags that many families share, read off the ``config.json`` of a tiny checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.matrix.case import read_config


def rope_setting(config: dict[str, Any], name: str, default: Any = None) -> Any:
    """A rotary setting: transformers 5 keeps it under ``rope_parameters``, older configs at the top."""
    for holder in (config.get("rope_parameters"), config.get("rope_scaling"), config):
        if isinstance(holder, dict) and holder.get(name) is not None:
            return holder[name]
    return default


def decoder_flags(folder: Path) -> list[str]:
    """Sizes, norms, rotary base and vocabulary of a decoder with a gated MLP; attention is the family's to add."""
    config = read_config(folder)
    flags: list[Any] = [
        *("--num-layers", config["num_hidden_layers"], "--hidden-size", config["hidden_size"]),
        *("--ffn-hidden-size", config["intermediate_size"], "--num-attention-heads", config["num_attention_heads"]),
        *("--vocab-size", config["vocab_size"], "--make-vocab-size-divisible-by", 8),
        *("--rotary-base", rope_setting(config, "rope_theta"), "--norm-epsilon", config["rms_norm_eps"]),
        *("--swiglu", "--use-rotary-position-embeddings", "--disable-bias-linear", "--normalization", "RMSNorm"),
    ]
    if not config.get("tie_word_embeddings"):
        flags.append("--untie-embeddings-and-output-weights")
    return [str(flag) for flag in flags]


def grouped_query_flags(folder: Path) -> list[str]:
    """Key heads and head width of grouped-query attention."""
    config = read_config(folder)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    flags = ["--group-query-attention", "--num-query-groups", config["num_key_value_heads"]]
    return [str(flag) for flag in [*flags, "--kv-channels", head_dim]]
