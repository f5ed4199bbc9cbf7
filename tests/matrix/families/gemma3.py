"""Gemma 3, text: windows shorter than the sequences in two of three layers."""

from __future__ import annotations

import json
from pathlib import Path

from tests.matrix.case import SMALL, FamilyCase, read_config, read_tensors, write_tensors, write_with_transformers


def write(case: FamilyCase, folder: Path, seed: int) -> None:
    """With norms stored as the distance from one."""
    write_with_transformers(case, folder, seed)
    tensors = read_tensors(folder)
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor -= 1.0
    write_tensors(folder, tensors)
    config = read_config(folder) | {"sliding_window_pattern": 3}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


CASE = FamilyCase(
    name="gemma3",
    config={
        **SMALL,
        "model_type": "gemma3_text",
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "head_dim": 20,
        "query_pre_attn_scalar": 20,
        "intermediate_size": 72,
        "sliding_window": 5,
        "sliding_window_pattern": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] + ["sliding_attention"] * 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        "tie_word_embeddings": True,
        "pad_token_id": None,
    },
    write=write,
    about="windows of 5 tokens with rotary angles of their own in layers 1, 2, 4 and 5 of 5; tied scaled embeddings",
)
