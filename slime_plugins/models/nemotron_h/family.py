"""Nemotron-H and Nemotron 3 Nano: each layer is one mixer (Mamba-2, attention, an MLP or experts), by a pattern.

Mamba-2 uses the flags of linear attention: a group is a key head, and the state width is the key width.  Rows of one
group stay together, like those of a delta net's key head, so tensor parallelism shards along whole groups.

Shapes: G = groups, r = heads of a group, dk = width of the state, dv = width of a head, K = width of the convolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.flag_rules import Config, Flag, sigmoid_experts
from slime.backends.megatron_utils.models.rule import Rule, WeightMap
from slime.train_data.model_dims import ModelDims
from slime.utils.errors import ConfigError
from slime_plugins.models.shared_flags import SIGMOID
from slime_plugins.models.shared_weights import check_rows, qkv_rule, relaid_rule

KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Letter of ``hybrid_override_pattern`` -> entry of ``layers_block_type``."""


def layer_kinds(config: Config) -> list[str]:
    """Return the kind of each layer (values of :data:`KINDS`); empty if config.json does not say."""
    kinds = config.get("layers_block_type")
    return list(kinds or (KINDS.get(letter, letter) for letter in config.get("hybrid_override_pattern") or ""))


def without_pattern(config: Config) -> dict[str, Any]:
    """Return config.json with its layers as names: with SGLang imported, transformers drops a pattern's MLP layers."""
    kinds = layer_kinds(config)
    known = {key: value for key, value in config.items() if key != "hybrid_override_pattern"}
    return {**known, "layers_block_type": kinds} if kinds else known


def kinds_of_run(config: Config | None, is_mamba: Sequence[object], is_moe: Sequence[object]) -> list[str]:
    """Return each layer's kind from config.json, or else from the flags, which do not tell an MLP from attention."""
    if kinds := layer_kinds(config or {}):
        return kinds
    if len(is_mamba) != len(is_moe):
        raise ConfigError(
            f"--linear-attention-freq describes {len(is_mamba)} layers and --moe-layer-freq {len(is_moe)}; for a "
            "nemotron_h both are lists of 0 and 1 for each layer; give them so, or --hf-checkpoint."
        )
    return ["moe" if moe else "mamba" if mamba else "attention" for mamba, moe in zip(is_mamba, is_moe, strict=True)]


def merge_in_proj(weight: Tensor, shape: ModelDims) -> Tensor:
    """Reorder rows from all z, x, B, C, steps to group by group: C, B, x, steps, z."""
    check_rows("in_proj", weight, sum(_in_proj_rows(shape)))
    groups = (shape.linear_key_heads, -1)
    z, x, b, c, steps = (part.unflatten(0, groups) for part in weight.split(_in_proj_rows(shape)))
    return torch.cat([c, b, x, steps, z], dim=1).flatten(0, 1)


def split_in_proj(merged: Tensor, shape: ModelDims) -> Tensor:
    """Invert :func:`merge_in_proj`."""
    z, x, b, c, steps = (rows // shape.linear_key_heads for rows in _in_proj_rows(shape))
    parts = merged.unflatten(0, (shape.linear_key_heads, -1)).split([c, b, x, steps, z], dim=1)
    return torch.cat([parts[place].flatten(0, 1) for place in (4, 2, 1, 0, 3)])


def _in_proj_rows(shape: ModelDims) -> list[int]:
    states = shape.linear_key_heads * shape.linear_key_dim
    return [shape.linear_value_width, shape.linear_value_width, states, states, shape.linear_value_heads]


def merge_convolution(weight: Tensor, shape: ModelDims) -> Tensor:
    """Merge [all x, all B, all C, 1, K] into [G * (2 dk + r dv), K]: C, B, x of each group; or a bias, without K."""
    check_rows("conv1d", weight, shape.linear_channels)
    parts = weight.split(_in_proj_rows(shape)[1:4])
    x, b, c = (part.unflatten(0, (shape.linear_key_heads, -1)) for part in parts)
    merged = torch.cat([c, b, x], dim=1).flatten(0, 1)
    return merged.squeeze(1) if merged.dim() == 3 else merged


def split_convolution(merged: Tensor, shape: ModelDims) -> Tensor:
    """Invert :func:`merge_convolution`."""
    sizes = [shape.linear_key_dim, shape.linear_key_dim, shape.linear_ratio * shape.linear_value_dim]
    c, b, x = (part.flatten(0, 1) for part in merged.unflatten(0, (shape.linear_key_heads, -1)).split(sizes, dim=1))
    joined = torch.cat([x, b, c])
    return joined.unsqueeze(1) if joined.dim() == 2 else joined


def mlp_rules(megatron: str, hf: str) -> Sequence[Rule]:
    """Return the rules of an MLP without a gate."""
    return tuple(
        Rule(f"{megatron}.linear_{linear}", (f"{hf}.{name}_proj.weight",))
        for linear, name in (("fc1.weight", "up"), ("fc2.weight", "down"))
    )


NEMOTRON_H = WeightMap(
    family="Nemotron-H",
    top=(
        Rule("embedding.word_embeddings.weight", ("backbone.embeddings.weight",)),
        Rule("output_layer.weight", ("lm_head.weight",)),
        Rule("decoder.final_layernorm.weight", ("backbone.norm_f.weight",)),
    ),
    layer=(
        # A layer has one norm, in front of the half that it has; fused into what follows on disk.
        *(
            Rule(name, ("norm.weight",))
            for name in (
                *("input_layernorm.weight", "pre_mlp_layernorm.weight", "self_attention.in_proj.layer_norm_weight"),
                *("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"),
            )
        ),
        qkv_rule("self_attention.linear_qkv.weight", "mixer.", "weight"),
        Rule("self_attention.linear_proj.weight", ("mixer.o_proj.weight",)),
        relaid_rule("self_attention.in_proj.weight", "mixer.in_proj.weight", merge_in_proj, split_in_proj),
        *(
            relaid_rule(f"self_attention.conv_{kind}", f"mixer.conv1d.{kind}", merge_convolution, split_convolution)
            for kind in ("weight", "bias")
        ),
        *(Rule(f"self_attention.{name}", (f"mixer.{name}",)) for name in ("A_log", "D", "dt_bias")),
        Rule("self_attention.norm_weight", ("mixer.norm.weight",)),
        Rule("self_attention.out_proj.weight", ("mixer.out_proj.weight",)),
        *mlp_rules("mlp", "mixer"),
        Rule("mlp.router.weight", ("mixer.gate.weight",)),
        Rule("mlp.router.expert_bias", ("mixer.gate.e_score_correction_bias",)),
        *mlp_rules("mlp.shared_experts", "mixer.shared_experts"),
        Rule("mlp.experts.linear_fc1.weight{expert}", ("mixer.experts.{expert}.up_proj.weight",)),
        Rule("mlp.experts.linear_fc2.weight{expert}", ("mixer.experts.{expert}.down_proj.weight",)),
    ),
    layer_prefix="backbone.layers.{layer}.",
    untrained=(r"mtp\..*",),
    engine_fp32=("mixer.A_log",),
    computed_in_fp32=(".norm_weight", ".A_log", ".D", ".dt_bias", ".conv_weight", ".conv_bias"),
    plain_parts=("mixer.in_proj.",),  # ends in the steps, a row a head: no whole block of an engine
)


def nemotron_h_flags(config: Config) -> Iterator[Flag | str]:
    """Yield the kinds of layers, and the experts, which config.json describes even if there are none."""
    kinds = layer_kinds(config)
    if unknown := sorted(set(kinds) - set(KINDS.values())):
        yield f"layers_block_type has {', '.join(unknown)}; the layers of a nemotron_h are {', '.join(KINDS.values())}"
    if kinds:
        places = {kind: [layer for layer, one in enumerate(kinds) if one == kind] for kind in KINDS.values()}
        yield Flag("num_layers", len(kinds), f"layers_block_type has {len(kinds)} entries")
        is_mamba = [int(kind == "mamba") for kind in kinds]
        yield Flag("linear_attention_freq", is_mamba, f"the layers with Mamba-2 are {places['mamba']}")
        if not places["mlp"] and config.get("intermediate_size"):
            yield Flag("ffn_hidden_size", config["intermediate_size"], "intermediate_size", is_fact=False)
    if "moe" in kinds:
        is_moe = ["sparse" if kind == "moe" else "dense" for kind in kinds]
        yield from (Flag(attribute, value, "its experts are so") for attribute, value in SIGMOID.items())
        yield from sigmoid_experts({**config, "n_routed_experts": config.get(_EXPERTS), "mlp_layer_types": is_moe})
        shared = config.get("moe_shared_expert_intermediate_size")
        yield Flag("moe_shared_expert_intermediate_size", shared, f"moe_shared_expert_intermediate_size is {shared}")
        if config.get("moe_latent_size"):
            yield f"moe_latent_size is {config['moe_latent_size']}; experts work on the whole hidden size here"
    limit = config.get("time_step_limit")
    if limit is not None and [float(bound) for bound in limit] != [0.0, float("inf")]:
        yield f"time_step_limit is {limit}; the steps of Mamba-2 have no limit here, as in SGLang"
    yield Flag("position_embedding_type", "none", "attention of a nemotron_h has no positions")


_EXPERTS = "num_local_experts"
"""Key under which the number of experts is read; config.json sets its own key even in a model without experts."""


def nemotron_h_dims(dims: ModelDims, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return which half each layer has."""
    attends = (kind in ("mamba", "attention") for kind in kinds_of_run(config, dims.is_linear, dims.is_moe))
    fields = tuple((("attends", half), ("has_mlp", not half)) for half in attends)
    return {"is_state_space": True, "layer_fields": fields}


FAMILIES = (
    ModelFamily(
        model_types=("nemotron_h",),
        weight_map=NEMOTRON_H,
        spec="slime_plugins.models.nemotron_h get_nemotron_h_spec",
        dims=nemotron_h_dims,
        has_linear_attention=True,
        always={"swiglu": False},
        spelled_out=without_pattern,
        fixed={
            **{"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "n_shared_experts": 1, "use_conv_bias": True},
            **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "residual_in_fp32"), False),
            "sliding_window": None,
        },
        sizes={
            "layer_norm_epsilon": "norm_epsilon",
            "n_groups": "linear_num_key_heads",
            "mamba_num_heads": "linear_num_value_heads",
            "ssm_state_size": "linear_key_head_dim",
            "mamba_head_dim": "linear_value_head_dim",
            "conv_kernel": "linear_conv_kernel_dim",
        },
        flags=nemotron_h_flags,
        num_experts_key=_EXPERTS,
        published={"NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": {"model_type": "nemotron_h"}},
    ),
)
