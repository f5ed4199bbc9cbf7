"""Gemma 4: two head widths, values that are the keys, per-layer embeddings, shared keys and values, experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slime.weights.stacked_experts import by_expert
from tests.matrix.case import (
    SMALL,
    FamilyCase,
    Tensors,
    quiet_transformers,
    random_tensor,
    read_tensors,
    write_tensors,
    write_with_transformers,
)

THREE_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
LAYERS = "model.language_model.layers."
TOWER = ("model.vision_tower.", "model.embed_vision.")
VISION = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 16},
    "pooling_kernel_size": 2,
}


def write(case: FamilyCase, folder: Path, seed: int) -> None:
    """A folder with a vision tower, and layer scalars other than 1."""
    text = {key: value for key, value in case.config.items() if key != "model_type"}
    config = {"model_type": "gemma4", "text_config": text, "vision_config": VISION, "audio_config": None}
    config["tie_word_embeddings"] = text["tie_word_embeddings"]
    write_with_transformers(replace(case, config=config), folder, seed)
    tensors, generator = read_tensors(folder), torch.Generator().manual_seed(seed + 1)
    for name, tensor in tensors.items():
        if name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
            tensor.copy_(1 + random_tensor(name, tensor.shape, generator))
    for name in unread_keys(text):  # published folders have them
        like = f"{LAYERS}{text['layer_types'].index(text['layer_types'][int(name.split('.')[3])])}"
        shape = tensors[f"{like}.self_attn.{name.partition('.self_attn.')[2]}"].shape
        tensors[name] = random_tensor(name, shape, generator)
    write_tensors(folder, tensors)


def unread_keys(config: Mapping[str, Any]) -> list[str]:
    """Names of keys and values in layers that attend to those of others."""
    count, shared = config["num_hidden_layers"], config.get("num_kv_shared_layers", 0)
    parts = ("k_proj", "v_proj", "k_norm")
    return [f"{LAYERS}{n}.self_attn.{part}.weight" for n in range(count - shared, count) for part in parts]


def reference(folder: Path) -> torch.nn.Module:
    """Return transformers' model without its tower, in fp32."""
    config = AutoConfig.from_pretrained(folder)
    config.vision_config = None
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation="eager"
        )
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # the data contains the token, whose gradient would be dropped
    return model


def without_tower(tensors: Tensors) -> Tensors:
    """The tensors of a folder that a trainer holds."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(TOWER)}


CASE = FamilyCase(
    name="gemma4",
    config={
        **SMALL,
        "model_type": "gemma4",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 24,
        "attention_k_eq_v": True,
        "intermediate_size": 72,
        "sliding_window": 5,
        "layer_types": THREE_LAYERS,
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 4.0,
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    write=write,
    reference=reference,
    pushed=without_tower,
    about="windows of 5 tokens in layers 1 and 2 of 3; in the last one 2 heads of keys, 24 wide, are the values; "
    "a quarter of each turns; logits capped at 4",
)
SMALL_CONFIG = {
    **CASE.config,
    "num_hidden_layers": 9,
    "layer_types": THREE_LAYERS * 3,
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 10,
    "vocab_size": 132,
    "vocab_size_per_layer_input": 132,
}
UNREAD = unread_keys(SMALL_CONFIG)
SMALL = replace(
    CASE,
    name="gemma4-small",
    config=SMALL_CONFIG,
    pushed=lambda tensors: {name: t for name, t in without_tower(tensors).items() if name not in UNREAD},
    has_stages=False,
    about="the same with an embedding for each layer, the last 3 of 9 with the keys of layers 5 and 6",
)
MOE = replace(
    CASE,
    name="gemma4-moe",
    config={
        **CASE.config,
        **{"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32},
    },
    pushed=lambda tensors: dict(by_expert(without_tower(tensors))),
    has_experts=True,
    about="the first with 8 experts beside each MLP, 3 for each token",
)
CASES = (CASE, SMALL, MOE)
