"""Flags of MiniMax-M2 against the HF config, and what its config must say for engines.

The family's config.json has names of its own for what others call otherwise: ``intermediate_size`` is an expert's, and
the part of a head that turns is given in dimensions.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from slime.utils.errors import ConfigError

MODEL_TYPE = "minimax_m2"
SPEC = "slime_plugins.models.minimax_m2 get_minimax_m2_spec"
_SIZES = {
    # key of config.json -> flag, attribute of args
    "num_local_experts": ("--num-experts", "num_experts"),
    "num_experts_per_tok": ("--moe-router-topk", "moe_router_topk"),
    "intermediate_size": ("--moe-ffn-hidden-size", "moe_ffn_hidden_size"),
    "scoring_func": ("--moe-router-score-function", "moe_router_score_function"),
}
_ENGINE_KEYS = {
    # key of config.json -> what SGLang does without it
    "use_qk_norm": "queries and keys are not normed",
    "use_routing_bias": "the router has no bias",
    "rotary_dim": "heads turn as a whole",
    "scoring_func": "it fails",
}


def minimax_mismatches(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """One line for each flag that differs; nothing for another family."""
    if config.get("model_type") != MODEL_TYPE:
        return
    if not args.spec:
        yield f"--spec is not given; the norms over all heads together need --spec {SPEC}"
    for key, (flag, attribute) in _SIZES.items():
        if config.get(key) not in (None, vars(args)[attribute]):
            yield f"{flag} is {vars(args)[attribute]}; {key} is {config[key]}"
    if config.get("qk_norm_type", "per_layer") != "per_layer":
        yield f"--spec {SPEC} norms all heads together; qk_norm_type is {config['qk_norm_type']!r}"
    has_bias = bool(config.get("use_routing_bias", True))
    if has_bias != bool(args.moe_router_enable_expert_bias):
        state = "given" if args.moe_router_enable_expert_bias else "not given"
        yield f"--moe-router-enable-expert-bias is {state}; use_routing_bias is {has_bias}"
    shared, given_shared = config.get("shared_intermediate_size") or 0, args.moe_shared_expert_intermediate_size or 0
    if shared != given_shared:
        yield f"--moe-shared-expert-intermediate-size is {given_shared}; shared_intermediate_size is {shared}"
    if args.moe_router_topk_scaling_factor not in (None, 1.0):
        yield f"--moe-router-topk-scaling-factor is {args.moe_router_topk_scaling_factor}; this model scales nothing"
    turning, width = config.get("rotary_dim"), config.get("head_dim")
    if turning is not None and width and turning != width * args.rotary_percent:
        yield f"--rotary-percent is {args.rotary_percent}; rotary_dim is {turning} of head_dim {width}"


def check_engine_keys(config: dict[str, Any]) -> None:
    """Refuse a config of which SGLang would serve another model, and say nothing.

    transformers does not know these names: a config.json that it wrote for a model built from scratch lacks them.

    Raises:
        ConfigError: with every setting that is missing.
    """
    if config.get("model_type") != MODEL_TYPE:
        return
    missing = [f"{key} (without it, {what})" for key, what in _ENGINE_KEYS.items() if not config.get(key)]
    if missing:
        raise ConfigError(
            f"config.json of --hf-checkpoint is that of a {MODEL_TYPE} and lacks what SGLang builds the model by: "
            + "; ".join(missing)
            + ". Copy these settings from the published config.json."
        )
