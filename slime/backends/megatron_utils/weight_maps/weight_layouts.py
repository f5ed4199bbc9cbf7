"""How Megatron stores what Hugging Face keeps in separate tensors; each function has its inverse beside it.

Shapes: G = query groups (key heads), q = query heads of a group, d = head dimension, h = hidden size.
All functions work on whole tensors, not on tensor-parallel slices, and only move numbers: the round trip is exact.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.utils.errors import DataError


@dataclass(frozen=True)
class ModelShape:
    """The sizes that the layouts depend on."""

    num_layers: int
    num_heads: int
    num_query_groups: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    padded_vocab_size: int
    has_tied_embeddings: bool
    num_experts: int = 0
    num_mtp_layers: int = 0
    has_query_latent: bool = False
    """Queries of multi-latent attention come out of a latent of their own."""
    index_head_dim: int = 128
    """Width of a head of sparse attention's indexer."""
    rotary_dim: int = 64
    """Dimensions of a head that turn, in latent attention and in the indexer."""
    linear_key_heads: int = 16
    """Of linear attention, as the following three."""
    linear_ratio: int = 2
    """Value heads of one key head."""
    linear_key_dim: int = 128
    linear_value_dim: int = 128

    @property
    def linear_channels(self) -> int:
        """Query, key and values that belong to one key head of linear attention."""
        return 2 * self.linear_key_dim + self.linear_ratio * self.linear_value_dim

    @classmethod
    def from_args(cls, args: Namespace) -> ModelShape:
        """From complete Megatron flags, of this run or those stored in a checkpoint."""
        num_groups = args.num_query_groups if args.group_query_attention else None
        return cls(
            num_layers=args.num_layers,
            num_heads=args.num_attention_heads,
            num_query_groups=num_groups or args.num_attention_heads,
            head_dim=args.kv_channels or args.hidden_size // args.num_attention_heads,
            hidden_size=args.hidden_size,
            vocab_size=args.vocab_size,
            padded_vocab_size=args.padded_vocab_size,
            has_tied_embeddings=not args.untie_embeddings_and_output_weights,
            num_experts=args.num_experts or 0,
            num_mtp_layers=args.mtp_num_layers or 0,
            has_query_latent=vars(args).get("q_lora_rank") is not None,
            # Absent from checkpoints of other programs, whose models have the usual sizes.
            index_head_dim=vars(args).get("dsa_indexer_head_dim") or cls.index_head_dim,
            rotary_dim=vars(args).get("qk_pos_emb_head_dim") or cls.rotary_dim,
            **_linear_sizes(args),
        )


def merge_qkv(query: Tensor, key: Tensor, value: Tensor, shape: ModelShape) -> Tensor:
    """[heads * d, ...], [G * d, ...], [G * d, ...] to [G * (q + 2) * d, ...]: each group's q, then its k and v.

    Works for weights [rows, h] and for biases [rows].

    Raises:
        DataError: the rows are not those of the model's heads.
    """
    check_rows("query", query, shape.num_heads * shape.head_dim)
    for name, tensor in (("key", key), ("value", value)):
        check_rows(name, tensor, shape.num_query_groups * shape.head_dim)
    rest = query.shape[1:]
    parts = [x.reshape(shape.num_query_groups, -1, *rest) for x in (query, key, value)]
    return torch.cat(parts, dim=1).reshape(-1, *rest)


def split_qkv(merged: Tensor, shape: ModelShape) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of :func:`merge_qkv`."""
    rest = merged.shape[1:]
    query_rows = shape.num_heads // shape.num_query_groups * shape.head_dim
    grouped = merged.reshape(shape.num_query_groups, -1, *rest)
    query, key, value = grouped.split([query_rows, shape.head_dim, shape.head_dim], dim=1)
    return query.reshape(-1, *rest), key.reshape(-1, *rest), value.reshape(-1, *rest)


def merge_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Both halves of a gated MLP's first matrix, gate on top."""
    if gate.shape != up.shape:
        raise DataError(f"gate_proj is {tuple(gate.shape)} and up_proj {tuple(up.shape)}; they must have one shape.")
    return torch.cat([gate, up])


def split_gate_up(merged: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`merge_gate_up`."""
    gate, up = merged.chunk(2)
    return gate, up


def turning_part_last(tensor: Tensor, shape: ModelShape) -> Tensor:
    """Per head of sparse attention's indexer, the rows that turn from the front to the back: [heads * d, ...].

    At the published sizes, 64 of 128, this swaps the halves of each head.
    """
    heads = tensor.unflatten(0, (-1, shape.index_head_dim))
    return torch.cat([heads[:, shape.rotary_dim :], heads[:, : shape.rotary_dim]], dim=1).flatten(0, 1)


def turning_part_first(tensor: Tensor, shape: ModelShape) -> Tensor:
    """The inverse of :func:`turning_part_last`."""
    heads = tensor.unflatten(0, (-1, shape.index_head_dim))
    split = shape.index_head_dim - shape.rotary_dim
    return torch.cat([heads[:, split:], heads[:, :split]], dim=1).flatten(0, 1)


def pad_vocabulary(tensor: Tensor, shape: ModelShape) -> Tensor:
    """[vocab, h] to [padded vocab, h], with zeros below.

    Raises:
        DataError: the checkpoint has another vocabulary than the flags.
    """
    if tensor.size(0) != shape.vocab_size:
        raise DataError(
            f"The checkpoint's vocabulary has {tensor.size(0)} rows; --vocab-size is {shape.vocab_size}; "
            "set it to the checkpoint's."
        )
    padding = tensor.new_zeros(shape.padded_vocab_size - tensor.size(0), *tensor.shape[1:])
    return torch.cat([tensor, padding])


def unpad_vocabulary(tensor: Tensor, shape: ModelShape) -> Tensor:
    """The inverse of :func:`pad_vocabulary`."""
    return tensor[: shape.vocab_size]


def tensor_parallel_slice(full: Tensor, *, dim: int, rank: int, size: int, is_gate_up: bool = False) -> Tensor:
    """The part of a whole tensor that tensor-parallel rank ``rank`` of ``size`` holds.

    Args:
        full: the whole tensor.
        dim: the dimension that is cut into ``size`` equal parts.
        rank: which part.
        size: number of parts.
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
    """The inverse of :func:`tensor_parallel_slice`: the whole of what the ranks hold, in their order."""
    if is_gate_up:
        gates, ups = zip(*(part.chunk(2, dim=dim) for part in parts), strict=True)
        parts = [*gates, *ups]
    return torch.cat(tuple(parts), dim=dim)


def _linear_sizes(args: Namespace) -> dict[str, int]:
    """The sizes of linear attention, of a model that has it."""
    if vars(args).get("linear_attention_freq") is None:
        return {}
    return {
        "linear_key_heads": args.linear_num_key_heads,
        "linear_ratio": args.linear_num_value_heads // args.linear_num_key_heads,
        "linear_key_dim": args.linear_key_head_dim,
        "linear_value_dim": args.linear_value_head_dim,
    }


def check_rows(name: str, tensor: Tensor, expected: int) -> None:
    """Raise DataError where a tensor of the checkpoint has other rows than the flags say."""
    if tensor.size(0) != expected:
        raise DataError(
            f"The checkpoint's {name} projection has {tensor.size(0)} rows; --num-attention-heads, "
            f"--num-query-groups and --kv-channels (of linear attention, --linear-num-key-heads and its like) make "
            f"{expected}; correct them."
        )
