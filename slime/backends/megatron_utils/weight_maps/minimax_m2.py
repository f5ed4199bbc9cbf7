"""MiniMax-M2: the dense layer's attention under its usual names, experts under Mixtral's."""

from __future__ import annotations

from slime.backends.megatron_utils.weight_maps.dense import ATTENTION, NORMS, TOP
from slime.backends.megatron_utils.weight_maps.rule import Rule, WeightMap, gate_up_rule

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
