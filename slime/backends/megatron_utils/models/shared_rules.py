"""Rules that several families share: the dense decoder's, those of experts, those of MTP layers."""

from __future__ import annotations

from slime.backends.megatron_utils.models.rule import Rule, gate_up_rule, qkv_rule

TOP = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",)),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
)
COMPOSITE_TOP = (
    # Of folders in which the language model is one part; ``COMPOSITE_LAYER`` is the prefix of its layers.
    Rule("embedding.word_embeddings.weight", ("model.language_model.embed_tokens.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",)),
    Rule("decoder.final_layernorm.weight", ("model.language_model.norm.weight",)),
)
COMPOSITE_LAYER = "model.language_model.layers.{layer}."
NORMS = (
    # Two spellings each: our layers keep the norms apart, TransformerEngine's inside the projection that follows.
    Rule("input_layernorm.weight", ("input_layernorm.weight",)),
    Rule("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",)),
    Rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
    Rule("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",)),
)
ATTENTION = (
    qkv_rule("self_attention.linear_qkv.weight", "self_attn.", "weight"),
    qkv_rule("self_attention.linear_qkv.bias", "self_attn.", "bias"),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",)),
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
)
MLP = (
    gate_up_rule("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
)

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
MTP = (
    Rule("eh_proj.weight", ("eh_proj.weight",)),
    Rule("enorm.weight", ("enorm.weight",)),
    Rule("hnorm.weight", ("hnorm.weight",)),
    Rule("final_layernorm.weight", ("shared_head.norm.weight",)),
)
"""Beside the layer's ``transformer_layer``, whose tensors are named as those of any layer."""

# Copies: the model has one of each.  Where the checkpoint at --hf-checkpoint has the copies, every export gives them
# too, so that it has all the tensors of its source; loading reads the originals.
MTP_COPIES = {
    "embedding.word_embeddings.weight": "embed_tokens.weight",
    "output_layer.weight": "shared_head.head.weight",
}
"""Megatron's parameter -> what its copy is called after the prefix of an MTP layer."""


def shared_expert_rules(name: str) -> tuple[Rule, ...]:
    """Return the rules of the experts that see every token; ``name`` is what Hugging Face calls them."""
    return (
        gate_up_rule(
            "mlp.shared_experts.linear_fc1.weight", f"mlp.{name}.gate_proj.weight", f"mlp.{name}.up_proj.weight"
        ),
        Rule("mlp.shared_experts.linear_fc2.weight", (f"mlp.{name}.down_proj.weight",)),
    )
