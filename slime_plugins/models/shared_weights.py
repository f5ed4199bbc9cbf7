"""Weight rules that several families share.

Megatron fuses tensors that are separate in Hugging Face; each layout function is followed by its inverse.  They work
on whole tensors, not on tensor-parallel slices, and only move values, so the round trip is exact.

Shapes: G = query groups (key heads), q = query heads of a group, d = head dimension, h = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.models.rule import Merge, Rule, WeightMap
from slime.train_data.model_dims import ModelDims
from slime.utils.errors import DataError


def merge_qkv(query: Tensor, key: Tensor, value: Tensor, shape: ModelDims, num_parts: int = 1) -> Tensor:
    """Merge [heads * d, ...], [G * d, ...], [G * d, ...] to [G * (q + 2) * d, ...]: each group's q, then its k and v.

    Works for weights [rows, h] and for biases [rows].  A query may have several parts, such as a gate.

    Raises:
        DataError: the rows are not those of the model's heads.
    """
    check_rows("query", query, num_parts * shape.num_attention_heads * shape.head_dim)
    for name, tensor in (("key", key), ("value", value)):
        check_rows(name, tensor, shape.num_query_groups * shape.head_dim)
    rest = query.shape[1:]
    parts = [x.reshape(shape.num_query_groups, -1, *rest) for x in (query, key, value)]
    return torch.cat(parts, dim=1).reshape(-1, *rest)


def split_qkv(merged: Tensor, shape: ModelDims, num_parts: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Invert :func:`merge_qkv`."""
    rest = merged.shape[1:]
    query_rows = num_parts * shape.num_attention_heads // shape.num_query_groups * shape.head_dim
    grouped = merged.reshape(shape.num_query_groups, -1, *rest)
    query, key, value = grouped.split([query_rows, shape.head_dim, shape.head_dim], dim=1)
    return query.reshape(-1, *rest), key.reshape(-1, *rest), value.reshape(-1, *rest)


def merge_gate_up(gate: Tensor, up: Tensor, shape: ModelDims) -> Tensor:
    """Concatenate gate and up to a gated MLP's first matrix, gate first."""
    if gate.shape != up.shape:
        raise DataError(f"gate_proj is {tuple(gate.shape)} and up_proj {tuple(up.shape)}; they must have one shape.")
    return torch.cat([gate, up])


def split_gate_up(merged: Tensor, shape: ModelDims) -> Sequence[Tensor]:
    """Invert :func:`merge_gate_up`."""
    return merged.chunk(2)


def turning_part_last(tensor: Tensor, shape: ModelDims) -> Tensor:
    """Move the rotated rows of each head of sparse attention's indexer from the front to the back: [heads * d, ...].

    At the published sizes, 64 of 128, this swaps the halves of each head.
    """
    heads = tensor.unflatten(0, (-1, shape.index_head_dim))
    return torch.cat([heads[:, shape.rope_dim :], heads[:, : shape.rope_dim]], dim=1).flatten(0, 1)


def turning_part_first(tensor: Tensor, shape: ModelDims) -> Tensor:
    """Invert :func:`turning_part_last`."""
    heads = tensor.unflatten(0, (-1, shape.index_head_dim))
    split = shape.index_head_dim - shape.rope_dim
    return torch.cat([heads[:, split:], heads[:, :split]], dim=1).flatten(0, 1)


def check_rows(name: str, tensor: Tensor, expected: int) -> None:
    """Raise DataError if a tensor of the checkpoint does not have the number of rows that the flags imply."""
    if tensor.size(0) != expected:
        raise DataError(
            f"The checkpoint's {name} projection has {tensor.size(0)} rows; --num-attention-heads, "
            f"--num-query-groups and --kv-channels (of linear attention, --linear-num-key-heads and its like) make "
            f"{expected}; correct them."
        )


def qkv_rule(megatron: str, prefix: str, kind: str) -> Rule:
    """Return the rule of query, key and value of grouped-query attention; ``kind`` is ``weight`` or ``bias``."""
    return Rule(megatron, tuple(f"{prefix}{x}_proj.{kind}" for x in "qkv"), merge=merge_qkv, split=split_qkv)


def relaid_rule(megatron: str, hf: str, merge: Merge, split: Callable[[Tensor, ModelDims], Tensor]) -> Rule:
    """Return the rule of a parameter that is one HF tensor with its elements reordered."""
    return Rule(megatron, (hf,), merge=merge, split=lambda tensor, shape: (split(tensor, shape),))


def gate_up_rule(megatron: str, gate: str, up: str) -> Rule:
    """Return the rule of a gated MLP's first matrix, which concatenates gate and up."""
    return Rule(megatron, (gate, up), merge=merge_gate_up, split=split_gate_up)


TOP = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",)),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
)
COMPOSITE: dict[str, Any] = {
    "top": (
        Rule("embedding.word_embeddings.weight", ("model.language_model.embed_tokens.weight",)),
        Rule("output_layer.weight", ("lm_head.weight",)),
        Rule("decoder.final_layernorm.weight", ("model.language_model.norm.weight",)),
    ),
    "layer_prefix": "model.language_model.layers.{layer}.",
    "parts": {"vision_model.": "model.visual."},
}
"""Fields of the weight map of a folder with a language model and a vision tower."""
TEXT_PART: dict[str, Any] = {
    "top": tuple(Rule(rule.megatron, (f"language_model.{rule.hf[0]}",)) for rule in TOP),
    "layer_prefix": "language_model.model.layers.{layer}.",
    "untrained": (r"(?:vision_tower|multi_modal_projector|mm_projector)\..+",),
}
"""The same for a folder in LLaVA's layout, whose tower the trainer never has."""
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
JOINED_MLP = (
    # Gate and up are also one tensor in the checkpoint.
    Rule("mlp.linear_fc1.weight", ("mlp.gate_up_proj.weight",)),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
)

DENSE = WeightMap(family="dense decoders", top=TOP, layer=(*NORMS, *ATTENTION, *MLP))


def shared_expert_rules(name: str) -> tuple[Rule, ...]:
    """Return the rules of shared experts; ``name`` is their name in Hugging Face."""
    return (
        gate_up_rule(
            "mlp.shared_experts.linear_fc1.weight", f"mlp.{name}.gate_proj.weight", f"mlp.{name}.up_proj.weight"
        ),
        Rule("mlp.shared_experts.linear_fc2.weight", (f"mlp.{name}.down_proj.weight",)),
    )


ROUTER = (Rule("mlp.router.weight", ("mlp.gate.weight",)),)
EXPERTS = (
    gate_up_rule(
        "mlp.experts.linear_fc1.weight{expert}",
        "mlp.experts.{expert}.gate_proj.weight",
        "mlp.experts.{expert}.up_proj.weight",
    ),
    Rule("mlp.experts.linear_fc2.weight{expert}", ("mlp.experts.{expert}.down_proj.weight",)),
)
SHARED_GATE = ("shared_expert_gate",)
"""A single row; engines hold it in a plain linear layer."""
GATED_SHARED_EXPERT = (
    *shared_expert_rules("shared_expert"),
    Rule("mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",)),
)
SOFTMAX_MOE = WeightMap(
    family="decoders with experts",
    top=TOP,
    layer=(*DENSE.layer, *ROUTER, *EXPERTS, *GATED_SHARED_EXPERT),
    plain_parts=SHARED_GATE,
)
BLOCK_SPARSE_EXPERTS = (
    Rule("mlp.router.weight", ("block_sparse_moe.gate.weight",)),
    gate_up_rule(
        "mlp.experts.linear_fc1.weight{expert}",
        "block_sparse_moe.experts.{expert}.w1.weight",
        "block_sparse_moe.experts.{expert}.w3.weight",
    ),
    Rule("mlp.experts.linear_fc2.weight{expert}", ("block_sparse_moe.experts.{expert}.w2.weight",)),
)
SIGMOID_EXPERTS = (
    *ROUTER,
    # Added to the scores only to choose experts, not to their weights; fp32 on both sides.
    Rule("mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias",)),
    *EXPERTS,
    *shared_expert_rules("shared_experts"),
)
MTP = (
    Rule("eh_proj.weight", ("eh_proj.weight",)),
    Rule("enorm.weight", ("enorm.weight",)),
    Rule("hnorm.weight", ("hnorm.weight",)),
    Rule("final_layernorm.weight", ("shared_head.norm.weight",)),
)
"""Rules of MTP layers; the tensors of their ``transformer_layer`` are named like those of any layer."""

# Copies of tensors that the model has once.  If --hf-checkpoint has the copies, exports write them too, so that they
# have all tensors of their source; loading reads the originals.
MTP_COPIES = {
    "embedding.word_embeddings.weight": "embed_tokens.weight",
    "output_layer.weight": "shared_head.head.weight",
}
"""Megatron's parameter -> name of its copy after the prefix of an MTP layer."""

LATENT_ATTENTION = (
    # With --q-lora-rank queries come from a latent, without it from one projection.
    Rule("self_attention.linear_q_proj.weight", ("self_attn.q_proj.weight",)),
    Rule("self_attention.linear_q_down_proj.weight", ("self_attn.q_a_proj.weight",)),
    Rule("self_attention.linear_q_up_proj.weight", ("self_attn.q_b_proj.weight",)),
    Rule("self_attention.linear_kv_down_proj.weight", ("self_attn.kv_a_proj_with_mqa.weight",)),
    Rule("self_attention.linear_kv_up_proj.weight", ("self_attn.kv_b_proj.weight",)),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",)),
    # Two spellings each: our layers keep the norms apart, TransformerEngine's inside the projection that follows.
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_a_layernorm.weight",)),
    Rule("self_attention.linear_q_up_proj.layer_norm_weight", ("self_attn.q_a_layernorm.weight",)),
    Rule("self_attention.kv_layernorm.weight", ("self_attn.kv_a_layernorm.weight",)),
    Rule("self_attention.linear_kv_up_proj.layer_norm_weight", ("self_attn.kv_a_layernorm.weight",)),
)
LATENT_MOE = WeightMap(
    family="decoders with latent attention and experts",
    top=TOP,
    layer=(*NORMS, *LATENT_ATTENTION, *MLP, *SIGMOID_EXPERTS),
    mtp=MTP,
    mtp_copies=MTP_COPIES,
    # SGLang fuses the two into one parameter, and drops either if it arrives in a call without the other.
    together=(("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),),
)
