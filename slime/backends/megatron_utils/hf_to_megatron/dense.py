"""Llama, Qwen2 and Qwen3: the inverse of ``megatron_to_hf.dense``, whose name tables it reads."""

from __future__ import annotations

from torch import Tensor

from slime.backends.megatron_utils.hf_to_megatron.tensors import HfTensors
from slime.backends.megatron_utils.megatron_to_hf.dense import (
    GATE_UP_NAMES,
    GLOBAL_NAMES,
    LAYER,
    LAYER_NAMES,
    QKV_NAMES,
)
from slime.backends.megatron_utils.weight_layouts import ModelShape, merge_gate_up, merge_qkv


def load_dense(name: str, tensors: HfTensors, shape: ModelShape) -> Tensor:
    """The whole Megatron parameter ``name``, before vocabulary padding.

    Raises:
        KeyError: these models have no such parameter, or the checkpoint lacks a tensor of it.
    """
    if name == "output_layer.weight" and shape.has_tied_embeddings:
        name = "embedding.word_embeddings.weight"
    if name in GLOBAL_NAMES:
        return tensors.get(GLOBAL_NAMES[name])
    match = LAYER.fullmatch(name)
    if match:
        prefix, rest = f"model.layers.{match[1]}.", match[2]
        if rest in LAYER_NAMES:
            return tensors.get(prefix + LAYER_NAMES[rest])
        if rest in QKV_NAMES:
            query, key, value = (tensors.get(prefix + hf_name) for hf_name in QKV_NAMES[rest])
            return merge_qkv(query, key, value, shape)
        if rest in GATE_UP_NAMES:
            gate, up = (tensors.get(prefix + hf_name) for hf_name in GATE_UP_NAMES[rest])
            return merge_gate_up(gate, up)
    raise KeyError(f"{name} is no parameter of a dense Llama, Qwen2 or Qwen3 model")
