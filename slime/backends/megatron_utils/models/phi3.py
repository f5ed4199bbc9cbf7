"""Phi-3 and Phi-4 (14B): Llama's layers; queries, keys and values in one tensor, and so are gate and up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.flag_rules import NO_BIASES, window_is_idle
from slime.backends.megatron_utils.models.rule import NORMS, TOP, Rule, WeightMap
from slime.backends.megatron_utils.models.weight_layouts import merge_qkv, split_qkv
from slime.train_data.model_dims import ModelDims


def merge_stacked_qkv(tensors: Sequence[Tensor], shape: ModelDims) -> Tensor:
    """[all q; all k; all v] to the order of groups."""
    keys = shape.num_query_groups * shape.head_dim
    query, key, value = tensors[0].split([shape.num_attention_heads * shape.head_dim, keys, keys])
    return merge_qkv(query, key, value, shape)


PHI3 = WeightMap(
    family="Phi-3 and Phi-4",
    top=TOP,
    layer=(
        *NORMS,
        Rule(
            "self_attention.linear_qkv.weight",
            ("self_attn.qkv_proj.weight",),
            merge=merge_stacked_qkv,
            split=lambda tensor, shape: (torch.cat(split_qkv(tensor, shape)),),
        ),
        Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",)),
        Rule("mlp.linear_fc1.weight", ("mlp.gate_up_proj.weight",)),
        Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
    ),
)

FAMILIES = (
    ModelFamily(
        model_types=("phi3",),
        weight_map=PHI3,
        class_defaults={"rms_norm_eps": 1e-5},
        fixed=NO_BIASES,
        flags=window_is_idle,
    ),
)
