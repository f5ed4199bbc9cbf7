"""Qwen3-Next: gated delta nets, attention with an output gate, experts with a gated shared expert.

Rows of one key head of a delta net, or of one query group of attention, stay together, so tensor parallelism shards
along whole heads.

Shapes: H = key heads, r = value heads of a key head, dk and dv = widths of their keys and values, K = width of the
convolution; G = query groups, q = query heads of a group, d = head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.models.family import BLOCK_FP8, ModelFamily
from slime.backends.megatron_utils.models.flag_rules import Config, Flag, fact, facts
from slime.backends.megatron_utils.models.rule import Rule, WeightMap
from slime.train_data.model_dims import ModelDims
from slime_plugins.models.shared_flags import SOFTMAX
from slime_plugins.models.shared_weights import (
    EXPERTS,
    GATED_SHARED_EXPERT,
    MLP,
    NORMS,
    ROUTER,
    SHARED_GATE,
    TOP,
    check_rows,
    merge_qkv,
    relaid_rule,
    split_qkv,
)


def merge_gated_qkv(query: Tensor, key: Tensor, value: Tensor, shape: ModelDims) -> Tensor:
    """Merge query and gate [G * q * 2 * d, h] (head by head), key and value [G * d, h] into [G * (2 q + 2) * d, h]:
    per group queries, gates, key, value.

    Raises:
        DataError: the rows are not those of the model's heads.
    """
    check_rows("query", query, 2 * shape.num_attention_heads * shape.head_dim)
    heads = query.unflatten(0, (shape.num_query_groups, -1, 2, shape.head_dim))
    return merge_qkv(heads.transpose(1, 2).flatten(0, 3), key, value, shape, num_parts=2)


def split_gated_qkv(merged: Tensor, shape: ModelDims) -> Sequence[Tensor]:
    """Invert :func:`merge_gated_qkv`."""
    halves, key, value = split_qkv(merged, shape, num_parts=2)
    heads = halves.unflatten(0, (shape.num_query_groups, 2, -1, shape.head_dim))
    return heads.transpose(1, 2).flatten(0, 3), key, value


def merge_in_proj(qkvz: Tensor, ba: Tensor, shape: ModelDims) -> Tensor:
    """Merge rows of q, k, v, z and of b, a, both ordered by key head: per key head q, k, v, b, a, z."""
    heads = shape.linear_key_heads
    check_rows("in_proj_qkvz", qkvz, heads * (shape.linear_group_channels + _gate_rows(shape)))
    check_rows("in_proj_ba", ba, heads * 2 * shape.linear_ratio)
    qkvz, ba = (x.unflatten(0, (heads, -1)) for x in (qkvz, ba))
    qkv, z = qkvz.split([shape.linear_group_channels, _gate_rows(shape)], dim=1)
    return torch.cat([qkv, ba, z], dim=1).flatten(0, 1)


def split_in_proj(merged: Tensor, shape: ModelDims) -> Sequence[Tensor]:
    """Invert :func:`merge_in_proj`."""
    sizes = [shape.linear_group_channels, 2 * shape.linear_ratio, _gate_rows(shape)]
    qkv, ba, z = merged.unflatten(0, (shape.linear_key_heads, -1)).split(sizes, dim=1)
    return torch.cat([qkv, z], dim=1).flatten(0, 1), ba.flatten(0, 1)


def merge_convolution(weight: Tensor, shape: ModelDims) -> Tensor:
    """Merge [all q, all k, all v, 1, K] into [H * (2 dk + r dv), K]: the channels of one key head together."""
    check_rows("conv1d", weight, shape.linear_key_heads * shape.linear_group_channels)
    keys = shape.linear_key_heads * shape.linear_key_dim
    parts = weight.squeeze(1).split([keys, keys, weight.size(0) - 2 * keys])
    return torch.cat([x.unflatten(0, (shape.linear_key_heads, -1)) for x in parts], dim=1).flatten(0, 1)


def split_convolution(merged: Tensor, shape: ModelDims) -> Tensor:
    """Invert :func:`merge_convolution`."""
    sizes = [shape.linear_key_dim, shape.linear_key_dim, _gate_rows(shape)]
    parts = merged.unflatten(0, (shape.linear_key_heads, -1)).split(sizes, dim=1)
    return torch.cat([x.flatten(0, 1) for x in parts]).unsqueeze(1)


def _gate_rows(shape: ModelDims) -> int:
    """Return the rows of z, and of v, that belong to one key head."""
    return shape.linear_ratio * shape.linear_value_dim


GATED_ATTENTION = (
    Rule(
        "self_attention.linear_qkv.weight",
        tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
        merge=merge_gated_qkv,
        split=split_gated_qkv,
    ),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",)),
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
)
DELTA_NET = (
    Rule(
        "self_attention.in_proj.weight",
        ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"),
        merge=merge_in_proj,
        split=split_in_proj,
    ),
    # The second spelling of the norm before it, as in NORMS.
    Rule("self_attention.in_proj.layer_norm_weight", ("input_layernorm.weight",)),
    relaid_rule("self_attention.conv_weight", "linear_attn.conv1d.weight", merge_convolution, split_convolution),
    Rule("self_attention.A_log", ("linear_attn.A_log",)),
    Rule("self_attention.dt_bias", ("linear_attn.dt_bias",)),
    Rule("self_attention.out_norm.weight", ("linear_attn.norm.weight",)),
    Rule("self_attention.out_proj.weight", ("linear_attn.out_proj.weight",)),
)
MTP = (
    Rule("eh_proj.weight", ("fc.weight",)),
    Rule("enorm.weight", ("pre_fc_norm_embedding.weight",)),
    Rule("hnorm.weight", ("pre_fc_norm_hidden.weight",)),
    Rule("final_layernorm.weight", ("norm.weight",)),
)
"""Rules of the single MTP layer, whose ``transformer_layer`` has full attention."""

QWEN3_NEXT = WeightMap(
    family="Qwen3-Next",
    top=TOP,
    layer=(*NORMS, *GATED_ATTENTION, *DELTA_NET, *MLP, *ROUTER, *EXPERTS, *GATED_SHARED_EXPERT),
    mtp=MTP,
    own_mtp_prefix="mtp.",
    mtp_layer_prefix="mtp.layers.{index}.",
    engine_fp32=("linear_attn.A_log",),
    computed_in_fp32=(".A_log", ".dt_bias", ".conv_weight"),
    plain_parts=(*SHARED_GATE, "in_proj_ba"),  # a few rows
)

DELTA_NET_SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_PUBLISHED: dict[str, Any] = {
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    **DELTA_NET_SIZES,
}

GATED = dict.fromkeys(("qk_layernorm", "attention_output_gate", "apply_layernorm_1p"), True)


def linear_flags(config: Config) -> Iterator[Flag]:
    """Yield the sizes of the delta nets, and their layers: one type per layer, or an interval."""
    yield from facts(config, {key: key for key in DELTA_NET_SIZES})
    types = (config.get("layer_types") or [])[: config.get("num_hidden_layers")]
    if types:
        full = [layer for layer, kind in enumerate(types) if kind != "linear_attention"]
        linear = [int(kind == "linear_attention") for kind in types]
        yield Flag("linear_attention_freq", linear, f"the layers with full attention are {full}")
    else:
        yield fact(config, "full_attention_interval", "linear_attention_freq")


FAMILIES = (
    ModelFamily(
        model_types=("qwen3_next",),
        weight_map=QWEN3_NEXT,
        spec="slime_plugins.models.qwen3_next get_qwen3_next_spec",
        has_linear_attention=True,
        always={**SOFTMAX, **GATED, "moe_shared_expert_gate": True},
        flags=linear_flags,
        # SGLang's adapters support neither the gate of attention nor the width of the shared expert.
        engine_without_adapters=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"),
        # The published config.json does not mention the MTP layer that every checkpoint has.
        defaults={"num_nextn_predict_layers": 1},
        published={
            "Qwen3-Next-80B-A3B-Instruct": _PUBLISHED,
            "Qwen3-Next-80B-A3B-Instruct-FP8": {**_PUBLISHED, "quantization_config": BLOCK_FP8},
            "Qwen3-Next-80B-A3B-Thinking": _PUBLISHED,
            "Qwen3-Next-80B-A3B-Thinking-FP8": {**_PUBLISHED, "quantization_config": BLOCK_FP8},
        },
    ),
)
