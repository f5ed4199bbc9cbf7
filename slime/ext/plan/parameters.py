"""The parameters that one trainer rank holds, counted exactly, with ``--lora-rank`` too.

A formula per layer rather than a model on fake tensors: it needs no Megatron, and says what belongs to what.
tests/ext/plan/test_parameters.py holds it against megatron-core's own model, and against the adapters that a run
makes, rank by rank.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from slime.backends.megatron_utils.flags.parallel import ParallelSizes
from slime.ext.plan.layout import StageChunk
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
        return ParameterCount(frozen=self.total, buffers_fp32=self.buffers_fp32)


@dataclass(frozen=True, slots=True)
class Adapters:
    """Size and place of the adapters of a run with ``--lora-rank``."""

    rank: int
    targets: tuple[str, ...]
    shares_experts: bool

    @classmethod
    def from_args(cls, args: Namespace) -> Adapters | None:
        """Return those that complete flags ask for, if any."""
        if vars(args).get("lora_rank") is None:
            return None
        return cls(args.lora_rank, tuple(args.lora_target_modules), args.lora_experts == "shared")

    def are_on(self, *names: str) -> bool:
        """Return True for a matrix that goes by one of these names."""
        return self.targets == ("all-linear",) or any(
            f".{name}".endswith(f".{target}") for name in names for target in self.targets
        )


def chunk_parameters(
    chunks: Sequence[StageChunk], dims: ModelDims, sizes: ParallelSizes, *, has_router_bias: bool = False
) -> ParameterCount:
    """Count the parameters that one rank of a pipeline stage holds.

    Args:
        has_router_bias: each router has a bias in fp32 (``--moe-router-enable-expert-bias``).
    """
    is_alone = sum(chunk.has_embedding + chunk.has_head for chunk in chunks) == 2
    total = ParameterCount()
    for chunk in chunks:
        if chunk.has_embedding:
            total += ParameterCount(dense=embedding_size(dims, sizes))
            if dims.tower is not None:
                tower = ParameterCount(dense=dims.tower.parameters)
                total += tower if dims.tower.is_trained else tower.as_frozen()
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """One linear layer on one rank."""

    name: str
    """Megatron's, after that of its block."""
    parts: tuple[str, ...]
    """The matrices of the checkpoint in it."""
    rows: int
    """Outputs on this rank."""
    columns: int
    """Inputs on this rank."""
    copies: int = 1
    """Experts on this rank."""
    has_bias: bool = False

    @property
    def size(self) -> int:
        """Elements, the bias included."""
        return self.copies * self.rows * (self.columns + self.has_bias)

    @property
    def is_expert(self) -> bool:
        return ".experts." in self.name

    def adapter(self, config: Adapters) -> int:
        """Return the elements of its adapter: an A for each part that is chosen, and one B of all rows."""
        parent = self.name.rpartition(".")[0]
        chosen = sum(config.are_on(self.name, f"{parent}.{part}") for part in self.parts)
        return self.copies * config.rank * (chosen * self.columns + self.rows) if chosen else 0


def layer_matrices(dims: ModelDims, sizes: ParallelSizes, layer: int) -> Iterator[Matrix]:
    """Yield the linear layers of one layer; ``layer`` as in :func:`layer_parameters`."""
    dims = dims.of_layer(layer)
    if dims.has_linear_attention(layer):
        yield from _linear_attention(dims, sizes)
    elif dims.attends:
        yield from _grouped_attention(dims, sizes) if dims.attention == "grouped" else _latent_attention(dims, sizes)
    if not dims.has_mlp:
        return
    if not dims.is_moe[min(layer, dims.num_layers - 1)]:
        yield from _mlp("mlp", dims, dims.ffn_hidden_size // sizes.tensor)
        return
    if dims.shared_ffn:
        yield from _mlp("mlp.shared_experts", dims, dims.shared_ffn // sizes.tensor)
    yield from _mlp("mlp.experts", dims, dims.expert_ffn // sizes.expert_tensor, dims.num_experts // sizes.expert)


def _mlp(name: str, dims: ModelDims, inner: int, copies: int = 1) -> Iterator[Matrix]:
    inputs = ("gate_proj", "up_proj")[-dims.gate_factor :]
    for linear, parts, rows, columns in (
        ("linear_fc1", inputs, dims.gate_factor * inner, dims.hidden_size),
        ("linear_fc2", ("down_proj",), dims.hidden_size, inner),
    ):
        yield Matrix(
            name=f"{name}.{linear}", parts=parts, rows=rows, columns=columns, copies=copies, has_bias=dims.has_bias
        )


def _attention(name: str, parts: str, rows: int, columns: int, *, has_bias: bool = False) -> Matrix:
    return Matrix(
        name=f"self_attention.{name}", parts=tuple(parts.split()), rows=rows, columns=columns, has_bias=has_bias
    )


def _grouped_attention(dims: ModelDims, sizes: ParallelSizes) -> Iterator[Matrix]:
    keys = dims.key_projections * dims.key_width
    width = (dims.query_width * (1 + dims.has_output_gate) + keys) // sizes.tensor
    has_bias = dims.has_qkv_bias or dims.has_bias
    yield _attention("linear_qkv", "q_proj k_proj v_proj", width, dims.hidden_size, has_bias=has_bias)
    inner = dims.query_width // sizes.tensor
    yield _attention("linear_proj", "o_proj", dims.hidden_size, inner, has_bias=dims.has_bias)


def _linear_attention(dims: ModelDims, sizes: ParallelSizes) -> Iterator[Matrix]:
    rows = dims.linear_channels + dims.linear_value_width + dims.linear_gates
    parts = "in_proj" if dims.is_state_space else "in_proj_qkvz in_proj_ba"
    yield _attention("in_proj", parts, rows // sizes.tensor, dims.hidden_size)
    yield _attention("out_proj", "out_proj", dims.hidden_size, dims.linear_value_width // sizes.tensor)


def _latent_attention(dims: ModelDims, sizes: ParallelSizes) -> Iterator[Matrix]:
    heads = dims.num_attention_heads // sizes.tensor
    queries = heads * (dims.qk_dim + dims.rope_dim)
    if dims.q_lora is None:
        yield _attention("linear_q_proj", "q_proj", queries, dims.hidden_size)
    else:
        yield _attention("linear_q_down_proj", "q_a_proj", dims.q_lora, dims.hidden_size)
        yield _attention("linear_q_up_proj", "q_b_proj", queries, dims.q_lora)
    yield _attention("linear_kv_down_proj", "kv_a_proj_with_mqa", dims.kv_lora + dims.rope_dim, dims.hidden_size)
    yield _attention("linear_kv_up_proj", "kv_b_proj", heads * (dims.qk_dim + dims.v_dim), dims.kv_lora)
    yield _attention("linear_proj", "o_proj", dims.hidden_size, heads * dims.v_dim, has_bias=dims.has_bias)


def layer_parameters(
    dims: ModelDims, sizes: ParallelSizes, layer: int, *, has_router_bias: bool = False
) -> ParameterCount:
    """Count one layer; ``layer`` from 0, and ``num_layers`` is the layer inside of an MTP layer."""
    dims = dims.of_layer(layer)
    matrices = list(layer_matrices(dims, sizes, layer))
    dense = sum(one.size for one in matrices if not one.is_expert) + _attention_vectors(dims, sizes, layer)
    num_norms = dims.attends + dims.has_mlp + dims.post_norms
    dense += num_norms * dims.norm_params * dims.hidden_size + dims.own_parameters
    if not dims.is_moe[min(layer, dims.num_layers - 1)]:
        return ParameterCount(dense=dense) + _indexer(dims, layer)
    router = dims.num_experts * (dims.hidden_size + dims.has_bias)
    gate = dims.hidden_size * dims.has_shared_gate if dims.shared_ffn else 0
    return _indexer(dims, layer) + ParameterCount(
        dense=dense + router + gate,
        expert=sum(one.size for one in matrices if one.is_expert),
        buffers_fp32=dims.num_experts * has_router_bias,
    )


def _attention_vectors(dims: ModelDims, sizes: ParallelSizes, layer: int) -> int:
    """Count the parameters of attention beside its projections: norms, sinks, convolution, decays."""
    if dims.has_linear_attention(layer):
        cut = dims.linear_channels * dims.linear_conv + 2 * dims.linear_value_heads
        if dims.is_state_space:
            return (cut + dims.linear_channels + dims.linear_value_heads + dims.linear_value_width) // sizes.tensor
        return cut // sizes.tensor + dims.linear_value_dim
    if not dims.attends:
        return 0
    if dims.attention != "grouped":
        return dims.norm_params * (dims.kv_lora + (dims.q_lora or 0)) if dims.has_qk_norm else 0
    # Norms are whole on every rank, over all heads or not.
    normed = dims.query_width + dims.key_width if dims.norms_all_heads else 2 * dims.head_dim
    norms = dims.norm_params * normed if dims.has_qk_norm else 0
    return norms + dims.num_attention_heads // sizes.tensor * dims.has_sinks


def _indexer(dims: ModelDims, layer: int) -> ParameterCount:
    """Count the indexer of sparse attention: whole on every rank, never trained.  MTP layers always have one."""
    if dims.attention != "sparse" or not (layer >= dims.num_layers or dims.computes_index[layer]):
        return ParameterCount()
    assert dims.q_lora is not None
    width = dims.index_heads * dims.index_head_dim
    matrices = dims.q_lora * width + dims.hidden_size * (dims.index_head_dim + dims.index_heads)
    return ParameterCount(frozen=matrices + 2 * dims.index_head_dim)


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


def with_adapters(
    count: ParameterCount, chunks: Sequence[StageChunk], dims: ModelDims, sizes: ParallelSizes, config: Adapters
) -> ParameterCount:
    """Count a rank whose adapters are trained, and nothing else."""

    def adapted(layer: int, sizes: ParallelSizes = sizes) -> list[Matrix]:
        # Sparse attention absorbs the up-projection of keys and values into queries and outputs.
        absorbed = "self_attention.linear_kv_up_proj" if dims.attention == "sparse" else ""
        return [one for one in layer_matrices(dims, sizes, layer) if one.name != absorbed]

    layers = [layer for chunk in chunks for layer in chunk.layers]
    matrices = [one for layer in layers for one in adapted(layer)]
    adapters = {
        is_expert: sum(one.adapter(config) for one in matrices if one.is_expert == is_expert)
        for is_expert in (False, True)
    }
    if config.shares_experts:
        # One expert's, whole on every rank, which are reduced and optimized as those of other layers are.
        one_each = replace(sizes, expert=dims.num_experts or 1, expert_tensor=1)
        shared = [one for layer in layers for one in adapted(layer, one_each) if one.is_expert]
        adapters = {False: adapters[False] + sum(one.adapter(config) for one in shared), True: 0}
    if any(chunk.has_head for chunk in chunks):
        matrices += adapted(dims.num_layers) * dims.num_mtp_layers
    return ParameterCount(
        dense=adapters[False],
        expert=adapters[True],
        frozen=count.total,
        buffers_fp32=count.buffers_fp32,
        frozen_matrices=sum(one.copies * one.rows * one.columns for one in matrices),
    )
