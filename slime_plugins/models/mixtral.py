"""Mixtral: Mistral's attention, experts in every layer under names that others took over (MiniMax-M2)."""

from __future__ import annotations

from collections.abc import Iterator

from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.flag_rules import (
    NO_BIASES,
    Config,
    Flag,
    expert_layers,
    window_is_idle,
)
from slime.backends.megatron_utils.models.rule import ATTENTION, NORMS, TOP, Rule, WeightMap, gate_up_rule

EXPERTS = (
    Rule("mlp.router.weight", ("block_sparse_moe.gate.weight",)),
    gate_up_rule(
        "mlp.experts.linear_fc1.weight{expert}",
        "block_sparse_moe.experts.{expert}.w1.weight",
        "block_sparse_moe.experts.{expert}.w3.weight",
    ),
    Rule("mlp.experts.linear_fc2.weight{expert}", ("block_sparse_moe.experts.{expert}.w2.weight",)),
)
SIZES = {
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "intermediate_size": "moe_ffn_hidden_size",
}
"""``intermediate_size`` is an expert's."""


def mixtral_flags(config: Config) -> Iterator[Flag | str]:
    """Yield the experts; what SGLang does not read of config.json must say nothing."""
    yield from window_is_idle(config)
    width, heads, hidden = (config.get(key) for key in ("head_dim", "num_attention_heads", "hidden_size"))
    if width and heads and hidden and width * heads != hidden:
        yield f"head_dim is {width} of {heads} heads; SGLang has hidden_size / num_attention_heads: {hidden // heads}"
    yield from expert_layers(config)
    yield Flag("moe_router_pre_softmax", False, "the weights of the chosen experts add up to 1")


FAMILIES = (
    ModelFamily(
        model_types=("mixtral",),
        weight_map=WeightMap(family="Mixtral", top=TOP, layer=(*NORMS, *ATTENTION, *EXPERTS)),
        always={"moe_router_score_function": "softmax"},
        fixed=NO_BIASES,
        sizes=SIZES,
        num_experts_key="num_local_experts",
        flags=mixtral_flags,
    ),
)
