"""MiniMax-M2: the dense layer's attention under its usual names, experts under Mixtral's."""

from __future__ import annotations

from collections.abc import Iterator

from slime.backends.megatron_utils.models.family import BLOCK_FP8, ModelFamily
from slime.backends.megatron_utils.models.flag_rules import SIGMOID_CHOICES, Config, Flag, choices, expert_layers
from slime.backends.megatron_utils.models.rule import Rule, WeightMap
from slime_plugins.models.shared_flags import LOCAL_EXPERT_SIZES
from slime_plugins.models.shared_weights import ATTENTION, BLOCK_SPARSE_EXPERTS, NORMS, TOP

SPEC = "slime_plugins.models.minimax_m2 get_minimax_m2_spec"

# Next to the gate, not inside it as in other families.
ROUTER_BIAS = (Rule("mlp.router.expert_bias", ("block_sparse_moe.e_score_correction_bias",)),)
WHOLE_NORMS = (
    # Names in torch_dist checkpoints; in memory they are named like per-head norms of other families.
    Rule("self_attention.q_norm.weight", ("self_attn.q_norm.weight",)),
    Rule("self_attention.k_norm.weight", ("self_attn.k_norm.weight",)),
)

MINIMAX_M2 = WeightMap(
    family="MiniMax-M2",
    top=TOP,
    layer=(*NORMS, *ATTENTION, *WHOLE_NORMS, *BLOCK_SPARSE_EXPERTS, *ROUTER_BIAS),
    engine_fp32=("block_sparse_moe.gate.weight",),
)


def minimax_flags(config: Config) -> Iterator[Flag | str]:
    """Yield the experts and the rotated fraction of a head, which config.json gives in dimensions.

    Its config.json has other names: ``intermediate_size`` is the width of an expert.
    """
    if config.get("qk_norm_type", "per_layer") != "per_layer":
        yield f"--spec {SPEC} norms all heads together; qk_norm_type is {config['qk_norm_type']!r}"
    has_bias, shared = bool(config.get("use_routing_bias", True)), config.get("shared_intermediate_size") or None
    yield Flag("moe_router_enable_expert_bias", has_bias, f"use_routing_bias is {has_bias}")
    yield Flag("moe_shared_expert_intermediate_size", shared, f"shared_intermediate_size is {shared or 0}")
    yield Flag("moe_router_topk_scaling_factor", None, "this model has none")
    turning, width = config.get("rotary_dim"), config.get("head_dim")
    if turning is not None and width:
        yield Flag("rotary_percent", turning / width, f"rotary_dim is {turning} of head_dim {width}")
    yield from expert_layers(config)
    yield from choices(SIGMOID_CHOICES)


FAMILIES = (
    ModelFamily(
        model_types=("minimax_m2",),
        weight_map=MINIMAX_M2,
        spec=SPEC,
        dims=lambda dims, config: {"norms_all_heads": True},
        sizes={**LOCAL_EXPERT_SIZES, "scoring_func": "moe_router_score_function"},
        num_experts_key="num_local_experts",
        always={"qk_layernorm": True, "moe_router_score_function": "sigmoid"},
        flags=minimax_flags,
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
