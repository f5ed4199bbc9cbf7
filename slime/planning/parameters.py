"""The parameters that one trainer rank holds, counted exactly.

A formula per layer rather than a model on fake tensors: it needs no Megatron, and says what belongs to what.
tests/unit/planning/test_parameters.py holds it against megatron-core's own model, rank by rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slime.planning.parallel import ParallelSizes
from slime.planning.stages import StageChunk
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

    def __add__(self, other: ParameterCount) -> ParameterCount:
        return ParameterCount(
            self.dense + other.dense,
            self.expert + other.expert,
            self.frozen + other.frozen,
            self.buffers_fp32 + other.buffers_fp32,
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
        """The same without gradients."""
        return ParameterCount(frozen=self.total, buffers_fp32=self.buffers_fp32)


def add_up(counts: Iterable[ParameterCount]) -> ParameterCount:
    """The sum."""
    return sum(counts, ParameterCount())


def chunk_parameters(
    chunks: Sequence[StageChunk], shape: ModelDims, sizes: ParallelSizes, *, role: str = "actor",
    has_router_bias: bool = False,
) -> ParameterCount:  # fmt: skip
    """What one rank of a pipeline stage holds.

    Args:
        chunks: of the stage.
        shape: of the model.
        sizes: of the parallel groups.
        role: "critic" has a value head in place of the vocabulary projection, and no MTP layers.
        has_router_bias: each router has a bias in fp32 (``--moe-router-enable-expert-bias``).
    """
    is_alone = sum(chunk.has_embedding + chunk.has_head for chunk in chunks) == 2
    total = ParameterCount()
    for chunk in chunks:
        if chunk.has_embedding:
            total += ParameterCount(dense=embedding_size(shape, sizes))
        for layer in chunk.layers:
            total += layer_parameters(shape, sizes, layer, has_router_bias=has_router_bias)
        if chunk.has_head:
            total += _head(shape, sizes, role, shares_embedding=is_alone)
            if role != "critic":
                total += mtp_parameters(shape, sizes, has_router_bias=has_router_bias)
    return total


def embedding_size(shape: ModelDims, sizes: ParallelSizes) -> int:
    """Elements of the embedding on one rank."""
    return (shape.vocab_rows // sizes.tensor + shape.learned_positions) * shape.hidden_size


def _head(shape: ModelDims, sizes: ParallelSizes, role: str, *, shares_embedding: bool) -> ParameterCount:
    norm = shape.norm_params * shape.hidden_size
    if role == "critic":
        return ParameterCount(dense=norm + shape.hidden_size)
    is_copy_needed = not (shape.has_tied_embeddings and shares_embedding)
    return ParameterCount(dense=norm + is_copy_needed * (shape.vocab_rows // sizes.tensor) * shape.hidden_size)


def layer_parameters(
    shape: ModelDims, sizes: ParallelSizes, layer: int, *, has_router_bias: bool = False
) -> ParameterCount:
    """One layer; ``layer`` from 0, and ``num_layers`` is the layer inside of an MTP layer."""
    norms = (2 + shape.post_norms) * shape.norm_params * shape.hidden_size
    if shape.has_linear_attention(layer):
        attention = _linear_attention
    else:
        attention = _grouped_attention if shape.attention == "grouped" else _latent_attention
    count = ParameterCount(dense=norms + attention(shape, sizes)) + _indexer(shape, layer)
    if not shape.is_moe[min(layer, shape.num_layers - 1)]:
        return count + ParameterCount(dense=_mlp(shape, sizes.tensor, shape.ffn_hidden_size))
    return count + _experts(shape, sizes, has_router_bias=has_router_bias)


def _grouped_attention(shape: ModelDims, sizes: ParallelSizes) -> int:
    width = (shape.query_width * (1 + shape.has_output_gate) + 2 * shape.key_width) // sizes.tensor
    # Whole on every rank, over all heads or not.
    normed = shape.query_width + shape.key_width if shape.norms_all_heads else 2 * shape.head_dim
    norms = shape.norm_params * normed if shape.has_qk_norm else 0
    biases = width * (shape.has_qkv_bias or shape.has_bias) + shape.hidden_size * shape.has_bias
    return shape.hidden_size * width + shape.hidden_size * shape.query_width // sizes.tensor + norms + biases


def _linear_attention(shape: ModelDims, sizes: ParallelSizes) -> int:
    """Projections (the last two of the inputs are one number per value head), convolution, decays, a gated norm."""
    inputs = shape.linear_channels + shape.linear_value_width + 2 * shape.linear_value_heads
    output = shape.linear_value_width * shape.hidden_size
    convolution = shape.linear_channels * shape.linear_conv
    cut = shape.hidden_size * inputs + output + convolution + 2 * shape.linear_value_heads
    return cut // sizes.tensor + shape.linear_value_dim


def _latent_attention(shape: ModelDims, sizes: ParallelSizes) -> int:
    heads = shape.num_attention_heads // sizes.tensor
    query_head = shape.qk_dim + shape.rope_dim
    if shape.q_lora is None:
        query = shape.hidden_size * heads * query_head
    else:
        query = shape.hidden_size * shape.q_lora + shape.q_lora * heads * query_head
    down = shape.hidden_size * (shape.kv_lora + shape.rope_dim)
    up = shape.kv_lora * heads * (shape.qk_dim + shape.v_dim)
    output = heads * shape.v_dim * shape.hidden_size + shape.hidden_size * shape.has_bias
    norms = shape.norm_params * (shape.kv_lora + (shape.q_lora or 0)) if shape.has_qk_norm else 0
    return query + down + up + output + norms


def _indexer(shape: ModelDims, layer: int) -> ParameterCount:
    """What chooses the keys of sparse attention: whole on every rank, never trained.  MTP layers always have one."""
    if shape.attention != "sparse" or not (layer >= shape.num_layers or shape.computes_index[layer]):
        return ParameterCount()
    assert shape.q_lora is not None
    width = shape.index_heads * shape.index_head_dim
    matrices = shape.q_lora * width + shape.hidden_size * (shape.index_head_dim + shape.index_heads)
    return ParameterCount(frozen=matrices + 2 * shape.index_head_dim)


def _mlp(shape: ModelDims, parts: int, width: int) -> int:
    inner = width // parts
    biases = (shape.gate_factor * inner + shape.hidden_size) * shape.has_bias
    return (shape.gate_factor + 1) * inner * shape.hidden_size + biases


def _experts(shape: ModelDims, sizes: ParallelSizes, *, has_router_bias: bool) -> ParameterCount:
    router = shape.num_experts * shape.hidden_size
    shared = _mlp(shape, sizes.tensor, shape.shared_ffn) + shape.hidden_size * shape.has_shared_gate
    one = (shape.gate_factor + 1) * shape.expert_ffn // sizes.expert_tensor * shape.hidden_size
    return ParameterCount(
        dense=router + (shared if shape.shared_ffn else 0),
        expert=shape.num_experts // sizes.expert * one,
        buffers_fp32=shape.num_experts * has_router_bias,
    )


def mtp_parameters(shape: ModelDims, sizes: ParallelSizes, *, has_router_bias: bool = False) -> ParameterCount:
    """All MTP layers: norms of both inputs, the projection that joins them, a layer, a norm."""
    join = 3 * shape.norm_params * shape.hidden_size + 2 * shape.hidden_size * shape.hidden_size // sizes.tensor
    layer = layer_parameters(shape, sizes, shape.num_layers, has_router_bias=has_router_bias)
    total = add_up([ParameterCount(dense=join) + layer] * shape.num_mtp_layers)
    return total if shape.trains_mtp else total.as_frozen()


def model_size(shape: ModelDims) -> int:
    """Parameters of the whole model, each counted once."""
    whole = [StageChunk(tuple(range(shape.num_layers)), True, True)]
    return chunk_parameters(whole, shape, ParallelSizes()).total
