"""Phi-3 and Phi-4 (14B): Llama's layers, with queries, keys and values in one tensor, and gate and up in another."""

from __future__ import annotations

import torch
from torch import Tensor

from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.rule import Rule, WeightMap
from slime.train_data.model_dims import ModelDims
from slime_plugins.models.shared_flags import NO_BIASES, window_is_idle
from slime_plugins.models.shared_weights import JOINED_MLP, NORMS, TOP, merge_qkv, relaid_rule, split_qkv


def merge_stacked_qkv(stacked: Tensor, shape: ModelDims) -> Tensor:
    """Reorder [all q; all k; all v] to group by group."""
    keys = shape.num_query_groups * shape.head_dim
    query, key, value = stacked.split([shape.num_attention_heads * shape.head_dim, keys, keys])
    return merge_qkv(query, key, value, shape)


PHI3 = WeightMap(
    family="Phi-3 and Phi-4",
    top=TOP,
    layer=(
        *NORMS,
        relaid_rule(
            "self_attention.linear_qkv.weight",
            "self_attn.qkv_proj.weight",
            merge_stacked_qkv,
            lambda tensor, shape: torch.cat(split_qkv(tensor, shape)),
        ),
        Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",)),
        *JOINED_MLP,
    ),
)

FAMILIES = (
    ModelFamily(
        model_types=("phi3",),
        weight_map=PHI3,
        fixed=NO_BIASES,
        flags=window_is_idle,
    ),
)
