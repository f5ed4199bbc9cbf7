"""Qwen3.5 and Qwen3.6, dense or with experts: Qwen3-Next's layers under the names of a folder with a vision tower.

The input projections of a delta net are four matrices here, each for all heads; queries, keys and values have the
order of the convolution's channels.  Published folders stack the experts of a layer in one tensor
(``slime.weights.stacked_experts``); pushes send them individually, which SGLang also loads.

Their vision tower is Qwen3-VL's, without features for layers.  The trainer has it only on request; otherwise only the
engines do.

Shapes: H = key heads, r = value heads of a key head, dk and dv = widths of their keys and values, h = hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.models.family import BLOCK_FP8, ModelFamily
from slime.backends.megatron_utils.models.flag_rules import Config, Flag
from slime.backends.megatron_utils.models.rule import Rule
from slime.train_data.model_dims import ModelDims
from slime_plugins.models.qwen3_next.family import (
    DELTA_NET,
    DELTA_NET_SIZES,
    GATED,
    GATED_ATTENTION,
    QWEN3_NEXT,
    linear_flags,
)
from slime_plugins.models.qwen3_vl import TOWER
from slime_plugins.models.shared_flags import NO_BIASES, SOFTMAX
from slime_plugins.models.shared_weights import (
    COMPOSITE,
    EXPERTS,
    GATED_SHARED_EXPERT,
    MLP,
    NORMS,
    ROUTER,
    SHARED_GATE,
    check_rows,
)


def merge_in_proj(qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, shape: ModelDims) -> Tensor:
    """Merge [all q, all k, all v; h], z [H * r * dv, h], b and a [H * r, h]: per key head q, k, v, b, a, z.

    Raises:
        DataError: the rows are not those of the model's heads.
    """
    heads, keys = shape.linear_key_heads, shape.linear_key_heads * shape.linear_key_dim
    check_rows("in_proj_qkv", qkv, shape.linear_channels)
    check_rows("in_proj_z", z, shape.linear_value_width)
    for name, tensor in (("in_proj_b", b), ("in_proj_a", a)):
        check_rows(name, tensor, shape.linear_value_heads)
    parts = (*qkv.split([keys, keys, shape.linear_value_width]), b, a, z)
    return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 1)


def split_in_proj(merged: Tensor, shape: ModelDims) -> Sequence[Tensor]:
    """Invert :func:`merge_in_proj`."""
    ratio, values = shape.linear_ratio, shape.linear_ratio * shape.linear_value_dim
    sizes = [shape.linear_key_dim, shape.linear_key_dim, values, ratio, ratio, values]
    grouped = merged.unflatten(0, (shape.linear_key_heads, -1)).split(sizes, dim=1)
    q, k, v, b, a, z = (part.flatten(0, 1) for part in grouped)
    return torch.cat([q, k, v]), z, b, a


IN_PROJ = Rule(
    "self_attention.in_proj.weight",
    tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
    merge=merge_in_proj,
    split=split_in_proj,
)
QWEN3_5 = replace(
    QWEN3_NEXT,
    family="Qwen3.5 and Qwen3.6",
    layer=(*NORMS, *GATED_ATTENTION, IN_PROJ, *DELTA_NET[1:], *MLP, *ROUTER, *EXPERTS, *GATED_SHARED_EXPERT),
    untrained=(r"model\.visual\..+",),
    plain_parts=(*SHARED_GATE, "in_proj_a", "in_proj_b"),  # a few rows
    **COMPOSITE,
)


def qwen3_5_flags(config: Config) -> Iterator[Flag]:
    """Yield the delta nets, and in a model with experts their routing and shared expert."""
    yield from linear_flags(config)
    if config.get("num_experts"):
        yield Flag("moe_router_pre_softmax", False, "the weights of this model's chosen experts add up to 1")
        yield Flag("moe_shared_expert_gate", True, "the shared expert of this model has a gate")


_DELTA_NETS = {**DELTA_NET_SIZES, "full_attention_interval": 4}


def _published(kind: str, value_heads: int = 32) -> dict[str, Any]:
    sizes = {**_DELTA_NETS, "linear_num_value_heads": value_heads}
    return {"model_type": kind, "partial_rotary_factor": 0.25, "mtp_num_hidden_layers": 1, **sizes}


_DENSE, _EXPERTS = "qwen3_5", "qwen3_5_moe"
_TOWER = {**TOWER, "deepstack_visual_indexes": []}
_OF_27B = {**_published(_DENSE, 48), "vision_config": {**_TOWER, "out_hidden_size": 5120}}
_OF_35B = {**_published(_EXPERTS), "vision_config": {**_TOWER, "out_hidden_size": 2048}}

FAMILIES = (
    ModelFamily(
        model_types=(_DENSE, _EXPERTS),
        weight_map=QWEN3_5,
        spec="slime_plugins.models.qwen3_5 get_qwen3_5_spec",
        other_specs=("slime_plugins.models.qwen3_5_vl",),
        has_linear_attention=True,
        always={**SOFTMAX, **GATED},
        fixed={**NO_BIASES, "attn_output_gate": True},
        flags=qwen3_5_flags,
        published={
            "Qwen3.5-0.8B": _published(_DENSE, 16),
            "Qwen3.5-4B": _published(_DENSE),
            "Qwen3.5-4B-Base": _published(_DENSE),
            "Qwen3.5-9B": _published(_DENSE),
            "Qwen3.5-27B": _OF_27B,
            "Qwen3.5-35B-A3B": _OF_35B,
            "Qwen3.5-35B-A3B-FP8": {**_OF_35B, "quantization_config": BLOCK_FP8},
            "Qwen3.6-27B": _OF_27B,
            "Qwen3.6-35B-A3B": _OF_35B,
        },
    ),
)
