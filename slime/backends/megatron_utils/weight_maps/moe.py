"""Rules that families with experts share: the router, the routed experts and the shared ones."""

from __future__ import annotations

from slime.backends.megatron_utils.weight_maps.rule import Rule, gate_up_rule

ROUTER = (Rule("mlp.router.weight", ("mlp.gate.weight",)),)
ROUTER_BIAS = (
    # Added to the scores when experts are chosen, never to their weights; fp32 on both sides.
    Rule("mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias",)),
)
EXPERTS = (
    gate_up_rule(
        "mlp.experts.linear_fc1.weight{expert}",
        "mlp.experts.{expert}.gate_proj.weight",
        "mlp.experts.{expert}.up_proj.weight",
    ),
    Rule("mlp.experts.linear_fc2.weight{expert}", ("mlp.experts.{expert}.down_proj.weight",)),
)


def shared_expert_rules(name: str) -> tuple[Rule, ...]:
    """The experts that see every token; ``name`` is what Hugging Face calls them."""
    return (
        gate_up_rule(
            "mlp.shared_experts.linear_fc1.weight", f"mlp.{name}.gate_proj.weight", f"mlp.{name}.up_proj.weight"
        ),
        Rule("mlp.shared_experts.linear_fc2.weight", (f"mlp.{name}.down_proj.weight",)),
    )
