"""Layouts of Megatron's joined tensors, which Hugging Face keeps apart; each function has its inverse beside it.

Shapes: G = query groups (key heads), q = query heads of a group, d = head dimension, h = hidden size.
All functions work on whole tensors, not on tensor-parallel slices, and only move numbers: the round trip is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime.train_data.model_dims import ModelDims
from slime.utils.errors import DataError


def merge_qkv(query: Tensor, key: Tensor, value: Tensor, shape: ModelDims, num_parts: int = 1) -> Tensor:
    """Merge [heads * d, ...], [G * d, ...], [G * d, ...] to [G * (q + 2) * d, ...]: each group's q, then its k and v.

    Works for weights [rows, h] and for biases [rows].  A query may have several parts: its gate beside it.

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
    """Join both halves of a gated MLP's first matrix, gate on top."""
    if gate.shape != up.shape:
        raise DataError(f"gate_proj is {tuple(gate.shape)} and up_proj {tuple(up.shape)}; they must have one shape.")
    return torch.cat([gate, up])


def split_gate_up(merged: Tensor, shape: ModelDims) -> Sequence[Tensor]:
    """Invert :func:`merge_gate_up`."""
    return merged.chunk(2)


def turning_part_last(tensor: Tensor, shape: ModelDims) -> Tensor:
    """Move the rows that turn, per head of sparse attention's indexer, from the front to the back: [heads * d, ...].

    At the published sizes, 64 of 128, this swaps the halves of each head.
    """
    heads = tensor.unflatten(0, (-1, shape.index_head_dim))
    return torch.cat([heads[:, shape.rope_dim :], heads[:, : shape.rope_dim]], dim=1).flatten(0, 1)


def turning_part_first(tensor: Tensor, shape: ModelDims) -> Tensor:
    """Invert :func:`turning_part_last`."""
    heads = tensor.unflatten(0, (-1, shape.index_head_dim))
    split = shape.index_head_dim - shape.rope_dim
    return torch.cat([heads[:, split:], heads[:, :split]], dim=1).flatten(0, 1)


VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters with a row for each token."""


def pad_vocabulary(tensor: Tensor, shape: ModelDims) -> Tensor:
    """Pad [vocab, h] to [padded vocab, h], with zeros below.

    Raises:
        DataError: the checkpoint has another vocabulary than the flags.
    """
    if tensor.size(0) != shape.vocab_size:
        raise DataError(
            f"The checkpoint's vocabulary has {tensor.size(0)} rows; --vocab-size is {shape.vocab_size}; "
            "set it to the checkpoint's."
        )
    padding = tensor.new_zeros(shape.vocab_rows - tensor.size(0), *tensor.shape[1:])
    return torch.cat([tensor, padding])


def tensor_parallel_slice(full: Tensor, *, dim: int, rank: int, size: int, is_gate_up: bool = False) -> Tensor:
    """Return the part of a whole tensor that tensor-parallel rank ``rank`` of ``size`` holds.

    Args:
        is_gate_up: gate and up are cut apart, so that each rank has matching columns of both.

    Raises:
        DataError: ``dim`` cannot be cut into ``size`` parts.
    """
    if size == 1:
        return full
    halves = full.chunk(2, dim=dim) if is_gate_up else (full,)
    if halves[0].size(dim) % size:
        raise DataError(f"dimension {dim} of a tensor of shape {tuple(full.shape)} cannot be cut into {size} parts.")
    parts = [half.chunk(size, dim=dim)[rank] for half in halves]
    return torch.cat(parts, dim=dim) if is_gate_up else parts[0]


def tensor_parallel_join(parts: Sequence[Tensor], *, dim: int, is_gate_up: bool = False) -> Tensor:
    """Invert :func:`tensor_parallel_slice`: join what the ranks hold, in their order."""
    if is_gate_up:
        gates, ups = zip(*(part.chunk(2, dim=dim) for part in parts), strict=True)
        parts = [*gates, *ups]
    return torch.cat(tuple(parts), dim=dim)


def check_rows(name: str, tensor: Tensor, expected: int) -> None:
    """Raise DataError where a tensor of the checkpoint has other rows than the flags say."""
    if tensor.size(0) != expected:
        raise DataError(
            f"The checkpoint's {name} projection has {tensor.size(0)} rows; --num-attention-heads, "
            f"--num-query-groups and --kv-channels (of linear attention, --linear-num-key-heads and its like) make "
            f"{expected}; correct them."
        )
