"""Llama, Qwen2 and Qwen3: dense decoders with grouped-query attention and a gated MLP."""

from __future__ import annotations

import re

from torch import Tensor

from slime.backends.megatron_utils.weight_layouts import ModelShape, split_gate_up, split_qkv

GLOBAL_NAMES = {
    # Megatron -> HF
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
LAYER_NAMES = {
    # behind decoder.layers.{i}. -> behind model.layers.{i}.; the norms have two spellings: our layers keep them apart,
    # TransformerEngine's keep them inside the projection that follows.
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
QKV_NAMES = {
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{x}_proj.bias" for x in "qkv"),
}
GATE_UP_NAMES = {"mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight")}

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def convert_dense(name: str, tensor: Tensor, shape: ModelShape) -> list[tuple[str, Tensor]]:
    """One whole Megatron parameter of a dense model as HF tensors.

    Raises:
        KeyError: these models have no such parameter.
    """
    if name in GLOBAL_NAMES:
        if name == "output_layer.weight" and shape.has_tied_embeddings:
            return []
        return [(GLOBAL_NAMES[name], tensor)]
    match = LAYER.fullmatch(name)
    if match:
        prefix, rest = f"model.layers.{match[1]}.", match[2]
        if rest in LAYER_NAMES:
            return [(prefix + LAYER_NAMES[rest], tensor)]
        if rest in QKV_NAMES:
            return [(prefix + n, part) for n, part in zip(QKV_NAMES[rest], split_qkv(tensor, shape), strict=True)]
        if rest in GATE_UP_NAMES:
            return [(prefix + n, part) for n, part in zip(GATE_UP_NAMES[rest], split_gate_up(tensor), strict=True)]
    raise KeyError(f"{name} is no parameter of a dense Llama, Qwen2 or Qwen3 model")
