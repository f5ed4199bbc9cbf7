"""Gemma 3, text (270M, 1B): norms around attention and MLP, windows in five of six layers, scaled embeddings."""

from __future__ import annotations

from collections.abc import Iterator

from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.flag_rules import Config, Flag
from slime.backends.megatron_utils.models.rule import Rule, WeightMap
from slime_plugins.models.shared_flags import windows
from slime_plugins.models.shared_weights import ATTENTION, MLP, TOP

LOCAL_ROTARY_BASE = 10000.0
"""Rotary base of the layers with a window, in all published models."""

NO_SOFTCAPS = {"final_logit_softcapping": None, "attn_logit_softcapping": None, "use_bidirectional_attention": False}

FOUR_NORMS = (
    # Two spellings each: our layers keep the norms separate, TransformerEngine's layers fuse them into the projection.
    Rule("input_layernorm.weight", ("input_layernorm.weight",)),
    Rule("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",)),
    Rule("post_self_attn_layernorm.weight", ("post_attention_layernorm.weight",)),
    Rule("pre_mlp_layernorm.weight", ("pre_feedforward_layernorm.weight",)),
    Rule("mlp.linear_fc1.layer_norm_weight", ("pre_feedforward_layernorm.weight",)),
    Rule("post_mlp_layernorm.weight", ("post_feedforward_layernorm.weight",)),
)
GEMMA3 = WeightMap(family="Gemma 3", top=TOP, layer=(*FOUR_NORMS, *ATTENTION, *MLP))


def gemma3_flags(config: Config) -> Iterator[Flag | str]:
    """Yield windows, rotary bases and the attention scale."""
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    yield from windows(config, every)
    rotary = config.get("rope_parameters") or {}
    local = (rotary.get("sliding_attention") or {}).get("rope_theta") or config.get("rope_local_base_freq")
    if local not in (None, LOCAL_ROTARY_BASE):
        yield f"--spec has rotary base {LOCAL_ROTARY_BASE:g} in layers with a window; rope_local_base_freq is {local}"
    base = (rotary.get("full_attention") or {}).get("rope_theta")
    if base is not None:
        yield Flag("rotary_base", base, f"rope_theta of full_attention is {base}")
    scalar = config.get("query_pre_attn_scalar")
    if scalar:
        yield Flag("softmax_scale", scalar**-0.5, f"query_pre_attn_scalar is {scalar}: {scalar**-0.5:g}")


FAMILIES = (
    ModelFamily(
        model_types=("gemma3_text",),
        weight_map=GEMMA3,
        spec="slime_plugins.models.gemma3 get_gemma3_spec",
        always={
            **dict.fromkeys(("post_self_attn_layernorm", "post_mlp_layernorm"), True),
            **dict.fromkeys(("qk_layernorm", "apply_layernorm_1p"), True),
        },
        fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, **NO_SOFTCAPS},
        flags=gemma3_flags,
        engine_dtype="bfloat16",
        published={
            name: {"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 6}
            for name in ("gemma-3-270m", "gemma-3-270m-it", "gemma-3-1b-pt", "gemma-3-1b-it")
        },
    ),
)
