"""Gemma 3, text (270M, 1B): norms around attention and MLP, windows in five of six layers, scaled embeddings."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.rule import Rule, WeightMap
from slime.backends.megatron_utils.models.shared_rules import ATTENTION, MLP, TOP

LOCAL_ROTARY_BASE = 10000.0
"""Of the layers with a window, in all published models."""

GEMMA3 = WeightMap(
    family="Gemma 3",
    top=TOP,
    layer=(
        # Two spellings each: our layers keep the norms apart, TransformerEngine's inside the projection that follows.
        Rule("input_layernorm.weight", ("input_layernorm.weight",)),
        Rule("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",)),
        Rule("post_self_attn_layernorm.weight", ("post_attention_layernorm.weight",)),
        Rule("pre_mlp_layernorm.weight", ("pre_feedforward_layernorm.weight",)),
        Rule("mlp.linear_fc1.layer_norm_weight", ("pre_feedforward_layernorm.weight",)),
        Rule("post_mlp_layernorm.weight", ("post_feedforward_layernorm.weight",)),
        *ATTENTION,
        *MLP,
    ),
)


def gemma3_mismatches(args: Namespace, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each flag that differs: windows, rotary bases, the scale of attention."""
    width = config["sliding_window"]
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    types = config.get("layer_types")
    if types and "full_attention" in types:
        every = types.index("full_attention") + 1
        if any((kind == "full_attention") != ((layer + 1) % every == 0) for layer, kind in enumerate(types)):
            yield f"layer_types has no full attention in each {every}th layer alone; --window-attn-skip-freq says that"
    if args.window_size is None or tuple(args.window_size) != (width - 1, 0) or args.window_attn_skip_freq != every:
        yield (
            f"--window-size is {args.window_size} and --window-attn-skip-freq {args.window_attn_skip_freq}; "
            f"sliding_window is {width}, in all but each {every}th layer: {width - 1},0 and {every}"
        )
    rotary = config.get("rope_parameters") or {}
    local = rotary.get("sliding_attention", {}).get("rope_theta") or config.get("rope_local_base_freq")
    if local not in (None, LOCAL_ROTARY_BASE):
        yield f"--spec has rotary base {LOCAL_ROTARY_BASE:g} in layers with a window; rope_local_base_freq is {local}"
    base = rotary.get("full_attention", {}).get("rope_theta")
    if base not in (None, args.rotary_base):
        yield f"--rotary-base is {args.rotary_base}; rope_theta of full_attention is {base}"
    scalar = config.get("query_pre_attn_scalar") or args.kv_channels
    given = args.softmax_scale or args.kv_channels**-0.5
    if abs(given - scalar**-0.5) > 1e-6 * given:
        yield f"--softmax-scale is {given:g}; query_pre_attn_scalar is {scalar}: {scalar**-0.5:g}"
    for flag, is_given in (
        ("--post-self-attn-layernorm", args.post_self_attn_layernorm),
        ("--post-mlp-layernorm", args.post_mlp_layernorm),
        ("--qk-layernorm", args.qk_layernorm),
        ("--apply-layernorm-1p", args.apply_layernorm_1p),
        ("--swiglu (gated; the activation is GELU)", args.swiglu),
    ):
        if not is_given:
            yield f"{flag} is not given; Gemma 3 has it"


FAMILIES = (
    ModelFamily(
        model_types=("gemma3_text",),
        weight_map=GEMMA3,
        spec="slime_plugins.models.gemma3 get_gemma3_spec",
        defaults={"sliding_window_pattern": 6},
        mismatches=gemma3_mismatches,
        published={
            name: {"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 6}
            for name in ("gemma-3-270m", "gemma-3-270m-it", "gemma-3-1b-pt", "gemma-3-1b-it")
        },
    ),
)
