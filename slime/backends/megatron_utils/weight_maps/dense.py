"""Llama, Qwen2 and Qwen3: dense decoders with grouped-query attention and a gated MLP."""

from __future__ import annotations

from slime.backends.megatron_utils.weight_maps.rule import Rule, WeightMap, gate_up_rule, qkv_rule

TOP = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",)),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
)
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

DENSE = WeightMap(family="dense Llama, Qwen2 and Qwen3", top=TOP, layer=(*NORMS, *ATTENTION, *MLP))
