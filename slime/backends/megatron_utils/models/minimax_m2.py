"""MiniMax-M2: the dense layer's attention under its usual names, experts under Mixtral's."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from slime.backends.megatron_utils.models.family import BLOCK_FP8, ModelFamily, differs
from slime.backends.megatron_utils.models.rule import Rule, WeightMap, gate_up_rule
from slime.backends.megatron_utils.models.shared_rules import ATTENTION, NORMS, TOP

SPEC = "slime_plugins.models.minimax_m2 get_minimax_m2_spec"

EXPERTS = (
    Rule("mlp.router.weight", ("block_sparse_moe.gate.weight",)),
    # Beside the gate, not inside of it as in other families.
    Rule("mlp.router.expert_bias", ("block_sparse_moe.e_score_correction_bias",)),
    gate_up_rule(
        "mlp.experts.linear_fc1.weight{expert}",
        "block_sparse_moe.experts.{expert}.w1.weight",
        "block_sparse_moe.experts.{expert}.w3.weight",
    ),
    Rule("mlp.experts.linear_fc2.weight{expert}", ("block_sparse_moe.experts.{expert}.w2.weight",)),
)
WHOLE_NORMS = (
    # In torch_dist checkpoints; in memory they are called as those of single heads in other families.
    Rule("self_attention.q_norm.weight", ("self_attn.q_norm.weight",)),
    Rule("self_attention.k_norm.weight", ("self_attn.k_norm.weight",)),
)

MINIMAX_M2 = WeightMap(family="MiniMax-M2", top=TOP, layer=(*NORMS, *ATTENTION, *WHOLE_NORMS, *EXPERTS))


def minimax_mismatches(args: Namespace, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each flag of MiniMax-M2 that differs.

    Its config.json has names of its own: ``intermediate_size`` is an expert's, and the part of a head that turns is
    given in dimensions.
    """
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
        yield f"--moe-router-topk-scaling-factor is {args.moe_router_topk_scaling_factor}; this model has none"
    turning, width = config.get("rotary_dim"), config.get("head_dim")
    if turning is not None and width and differs(turning, width * args.rotary_percent):
        yield f"--rotary-percent is {args.rotary_percent}; rotary_dim is {turning} of head_dim {width}"


FAMILIES = (
    ModelFamily(
        model_types=("minimax_m2",),
        weight_map=MINIMAX_M2,
        spec=SPEC,
        dims=lambda args, config: {"norms_all_heads": True},
        sizes={
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "moe_router_topk",
            "intermediate_size": "moe_ffn_hidden_size",
            "scoring_func": "moe_router_score_function",
        },
        num_experts_key="num_local_experts",
        mismatches=minimax_mismatches,
        engine_keys={
            "use_qk_norm": "queries and keys are not normed",
            "use_routing_bias": "the router has no bias",
            "rotary_dim": "heads turn as a whole",
            "scoring_func": "it fails",
        },
        engine_hides_experts=True,
        published={
            "MiniMax-M2": {
                "model_type": "minimax_m2",
                "use_qk_norm": True,
                "use_routing_bias": True,
                "rotary_dim": 64,
                "scoring_func": "sigmoid",
                "quantization_config": BLOCK_FP8,
            }
        },
    ),
)
