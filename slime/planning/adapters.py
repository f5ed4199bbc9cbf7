"""The parameters of a rank with ``--lora-rank``: adapters are trained, all else is frozen.

tests/unit/planning/test_parameters.py holds the counts against the adapters that a run makes, rank by rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slime.flags.lora import LoraConfig
from slime.planning.layout import ParallelSizes, StageChunk
from slime.planning.parameters import ParameterCount
from slime.train_data.model_dims import ModelDims


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """One linear layer on one rank."""

    name: str
    """Megatron's, behind that of its block."""
    parts: tuple[str, ...]
    """The matrices of the checkpoint in it."""
    rows: int
    """Outputs on this rank."""
    columns: int
    """Inputs on this rank."""
    copies: int = 1
    """Experts on this rank."""

    @property
    def is_expert(self) -> bool:
        """True for a routed expert's."""
        return ".experts." in self.name

    def adapter(self, config: LoraConfig) -> int:
        """Return the elements of its adapter: an A for each part that is chosen, and one B of all rows."""
        chosen = sum(config.chooses(self.name, f"{self.name.rpartition('.')[0]}.{part}") for part in self.parts)
        return self.copies * config.rank * (chosen * self.columns + self.rows) if chosen else 0


def layer_matrices(dims: ModelDims, sizes: ParallelSizes, layer: int) -> Iterator[Matrix]:
    """Yield the linear layers of one layer; arguments as in ``layer_parameters``."""
    if dims.has_linear_attention(layer):
        yield from _linear_attention(dims, sizes)
    else:
        yield from _grouped_attention(dims, sizes) if dims.attention == "grouped" else _latent_attention(dims, sizes)
    if not dims.is_moe[min(layer, dims.num_layers - 1)]:
        yield from _mlp("mlp", dims, dims.ffn_hidden_size // sizes.tensor)
        return
    if dims.shared_ffn:
        yield from _mlp("mlp.shared_experts", dims, dims.shared_ffn // sizes.tensor)
    yield from _mlp("mlp.experts", dims, dims.expert_ffn // sizes.expert_tensor, dims.num_experts // sizes.expert)


def _mlp(name: str, dims: ModelDims, inner: int, copies: int = 1) -> Iterator[Matrix]:
    inputs = ("gate_proj", "up_proj")[-dims.gate_factor :]
    rows, hidden = dims.gate_factor * inner, dims.hidden_size
    yield Matrix(name=f"{name}.linear_fc1", parts=inputs, rows=rows, columns=hidden, copies=copies)
    yield Matrix(name=f"{name}.linear_fc2", parts=("down_proj",), rows=hidden, columns=inner, copies=copies)


def _attention(name: str, parts: str, rows: int, columns: int) -> Matrix:
    return Matrix(name=f"self_attention.{name}", parts=tuple(parts.split()), rows=rows, columns=columns)


def _grouped_attention(dims: ModelDims, sizes: ParallelSizes) -> Iterator[Matrix]:
    width = (dims.query_width * (1 + dims.has_output_gate) + 2 * dims.key_width) // sizes.tensor
    yield _attention("linear_qkv", "q_proj k_proj v_proj", width, dims.hidden_size)
    yield _attention("linear_proj", "o_proj", dims.hidden_size, dims.query_width // sizes.tensor)


def _linear_attention(dims: ModelDims, sizes: ParallelSizes) -> Iterator[Matrix]:
    rows = dims.linear_channels + dims.linear_value_width + 2 * dims.linear_value_heads
    yield _attention("in_proj", "in_proj_qkvz in_proj_ba", rows // sizes.tensor, dims.hidden_size)
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
    if dims.attention != "sparse":  # which absorbs it into queries and outputs
        yield _attention("linear_kv_up_proj", "kv_b_proj", heads * (dims.qk_dim + dims.v_dim), dims.kv_lora)
    yield _attention("linear_proj", "o_proj", dims.hidden_size, heads * dims.v_dim)


def with_adapters(
    count: ParameterCount, chunks: Sequence[StageChunk], dims: ModelDims, sizes: ParallelSizes, config: LoraConfig
) -> ParameterCount:
    """Count a rank whose adapters are trained.

    Args:
        count: of the rank without them.
        chunks: of the stage.
        dims: of the model.
        sizes: of the parallel groups.
        config: of the adapters.
    """
    matrices = [one for chunk in chunks for layer in chunk.layers for one in layer_matrices(dims, sizes, layer)]
    adapters = {
        is_expert: sum(one.adapter(config) for one in matrices if one.is_expert == is_expert)
        for is_expert in (False, True)
    }
    if any(chunk.has_head for chunk in chunks):
        matrices += [*layer_matrices(dims, sizes, dims.num_layers)] * dims.num_mtp_layers
    return ParameterCount(
        dense=adapters[False],
        expert=adapters[True],
        frozen=count.total,
        buffers_fp32=count.buffers_fp32,
        frozen_matrices=sum(one.copies * one.rows * one.columns for one in matrices),
    )
