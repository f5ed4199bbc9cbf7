"""The parameters that one trainer rank holds, counted exactly.

A formula per layer rather than a model on fake tensors: it needs no Megatron, and says what belongs to what.
tests/unit/planning/test_parameters.py holds it against megatron-core's own model, rank by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime.planning.layout import ParallelSizes, StageChunk
from slime.train_data.model_dims import ModelDims


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Elements on one rank, by what becomes of their gradients and optimizer states."""

    dense: int = 0
    """Trained, and shared by all data- and context-parallel ranks."""
    expert: int = 0
    """Trained, and shared by the ranks with the same experts."""
    frozen: int = 0
    """Without gradient: an indexer, MTP layers that are not trained."""
    buffers_fp32: int = 0
    """Elements of fp32 buffers that are saved and pushed (router biases)."""
    frozen_matrices: int = 0
    """Elements of the layers' matrices under adapters, which ``--lora-base-precision`` quantizes; among ``frozen``."""

    def __add__(self, other: ParameterCount) -> ParameterCount:
        return ParameterCount(
            self.dense + other.dense,
            self.expert + other.expert,
            self.frozen + other.frozen,
            self.buffers_fp32 + other.buffers_fp32,
            self.frozen_matrices + other.frozen_matrices,
        )

    @property
    def total(self) -> int:
        """Parameters, buffers not among them."""
        return self.dense + self.expert + self.frozen

    @property
    def trained(self) -> int:
        """Those that have gradients."""
        return self.dense + self.expert

    def as_frozen(self) -> ParameterCount:
        """Return the same count without gradients."""
        return ParameterCount(frozen=self.total, buffers_fp32=self.buffers_fp32)


def chunk_parameters(
    chunks: Sequence[StageChunk], dims: ModelDims, sizes: ParallelSizes, *, has_router_bias: bool = False
) -> ParameterCount:
    """Count the parameters that one rank of a pipeline stage holds.

    Args:
        chunks: of the stage.
        dims: of the model.
        sizes: of the parallel groups.
        has_router_bias: each router has a bias in fp32 (``--moe-router-enable-expert-bias``).
    """
    is_alone = sum(chunk.has_embedding + chunk.has_head for chunk in chunks) == 2
    total = ParameterCount()
    for chunk in chunks:
        if chunk.has_embedding:
            tower = ParameterCount(dense=dims.tower_parameters)
            total += ParameterCount(dense=embedding_size(dims, sizes))
            total += tower if dims.trains_tower else tower.as_frozen()
        for layer in chunk.layers:
            total += layer_parameters(dims, sizes, layer, has_router_bias=has_router_bias)
        if chunk.has_head:
            total += _head(dims, sizes, shares_embedding=is_alone)
            total += mtp_parameters(dims, sizes, has_router_bias=has_router_bias)
    return total


def embedding_size(dims: ModelDims, sizes: ParallelSizes) -> int:
    """Return the elements of the embedding on one rank."""
    return (dims.vocab_rows // sizes.tensor + dims.learned_positions) * dims.hidden_size


def _head(dims: ModelDims, sizes: ParallelSizes, *, shares_embedding: bool) -> ParameterCount:
    norm = dims.norm_params * dims.hidden_size
    is_copy_needed = not (dims.has_tied_embeddings and shares_embedding)
    return ParameterCount(dense=norm + is_copy_needed * (dims.vocab_rows // sizes.tensor) * dims.hidden_size)


def layer_parameters(
    dims: ModelDims, sizes: ParallelSizes, layer: int, *, has_router_bias: bool = False
) -> ParameterCount:
    """Count one layer; ``layer`` from 0, and ``num_layers`` is the layer inside of an MTP layer."""
    norms = (2 + dims.post_norms) * dims.norm_params * dims.hidden_size
    if dims.has_linear_attention(layer):
        attention = _linear_attention
    else:
        attention = _grouped_attention if dims.attention == "grouped" else _latent_attention
    count = ParameterCount(dense=norms + attention(dims, sizes) + dims.own_parameters) + _indexer(dims, layer)
    if not dims.is_moe[min(layer, dims.num_layers - 1)]:
        return count + ParameterCount(dense=_mlp(dims, sizes.tensor, dims.ffn_hidden_size))
    return count + _experts(dims, sizes, has_router_bias=has_router_bias)


def _grouped_attention(dims: ModelDims, sizes: ParallelSizes) -> int:
    width = (dims.query_width * (1 + dims.has_output_gate) + 2 * dims.key_width) // sizes.tensor
    # Whole on every rank, over all heads or not.
    normed = dims.query_width + dims.key_width if dims.norms_all_heads else 2 * dims.head_dim
    norms = dims.norm_params * normed if dims.has_qk_norm else 0
    biases = width * (dims.has_qkv_bias or dims.has_bias) + dims.hidden_size * dims.has_bias
    sinks = dims.num_attention_heads // sizes.tensor * dims.has_sinks
    return dims.hidden_size * width + dims.hidden_size * dims.query_width // sizes.tensor + norms + biases + sinks


def _linear_attention(dims: ModelDims, sizes: ParallelSizes) -> int:
    """Count projections (the last two inputs are one number per value head), convolution, decays and a gated norm."""
    inputs = dims.linear_channels + dims.linear_value_width + 2 * dims.linear_value_heads
    output = dims.linear_value_width * dims.hidden_size
    convolution = dims.linear_channels * dims.linear_conv
    cut = dims.hidden_size * inputs + output + convolution + 2 * dims.linear_value_heads
    return cut // sizes.tensor + dims.linear_value_dim


def _latent_attention(dims: ModelDims, sizes: ParallelSizes) -> int:
    heads = dims.num_attention_heads // sizes.tensor
    query_head = dims.qk_dim + dims.rope_dim
    if dims.q_lora is None:
        query = dims.hidden_size * heads * query_head
    else:
        query = dims.hidden_size * dims.q_lora + dims.q_lora * heads * query_head
    down = dims.hidden_size * (dims.kv_lora + dims.rope_dim)
    up = dims.kv_lora * heads * (dims.qk_dim + dims.v_dim)
    output = heads * dims.v_dim * dims.hidden_size + dims.hidden_size * dims.has_bias
    norms = dims.norm_params * (dims.kv_lora + (dims.q_lora or 0)) if dims.has_qk_norm else 0
    return query + down + up + output + norms


def _indexer(dims: ModelDims, layer: int) -> ParameterCount:
    """Count the indexer of sparse attention: whole on every rank, never trained.  MTP layers always have one."""
    if dims.attention != "sparse" or not (layer >= dims.num_layers or dims.computes_index[layer]):
        return ParameterCount()
    assert dims.q_lora is not None
    width = dims.index_heads * dims.index_head_dim
    matrices = dims.q_lora * width + dims.hidden_size * (dims.index_head_dim + dims.index_heads)
    return ParameterCount(frozen=matrices + 2 * dims.index_head_dim)


def _mlp(dims: ModelDims, parts: int, width: int) -> int:
    inner = width // parts
    biases = (dims.gate_factor * inner + dims.hidden_size) * dims.has_bias
    return (dims.gate_factor + 1) * inner * dims.hidden_size + biases


def _experts(dims: ModelDims, sizes: ParallelSizes, *, has_router_bias: bool) -> ParameterCount:
    router = dims.num_experts * (dims.hidden_size + dims.has_bias)
    shared = _mlp(dims, sizes.tensor, dims.shared_ffn) + dims.hidden_size * dims.has_shared_gate
    one = _mlp(dims, sizes.expert_tensor, dims.expert_ffn)
    return ParameterCount(
        dense=router + (shared if dims.shared_ffn else 0),
        expert=dims.num_experts // sizes.expert * one,
        buffers_fp32=dims.num_experts * has_router_bias,
    )


def mtp_parameters(dims: ModelDims, sizes: ParallelSizes, *, has_router_bias: bool = False) -> ParameterCount:
    """Count all MTP layers: norms of both inputs, the projection that joins them, a layer, a norm."""
    join = 3 * dims.norm_params * dims.hidden_size + 2 * dims.hidden_size * dims.hidden_size // sizes.tensor
    layer = layer_parameters(dims, sizes, dims.num_layers, has_router_bias=has_router_bias)
    total = sum([ParameterCount(dense=join) + layer] * dims.num_mtp_layers, ParameterCount())
    return total if dims.trains_mtp else total.as_frozen()


def model_size(dims: ModelDims) -> int:
    """Count the parameters of the whole model, each once."""
    whole = [StageChunk(tuple(range(dims.num_layers)), True, True)]
    return chunk_parameters(whole, dims, ParallelSizes()).total
