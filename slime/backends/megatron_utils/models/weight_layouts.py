"""Vocabulary padding and tensor-parallel slices of whole tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime.train_data.model_dims import ModelDims
from slime.utils.errors import DataError

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters with one row per token."""


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
        is_gate_up: shard gate and up separately, so that each rank has matching parts of both.

    Raises:
        DataError: ``dim`` is not divisible by ``size``.
    """
    if size == 1:
        return full
    halves = full.chunk(2, dim=dim) if is_gate_up else (full,)
    if halves[0].size(dim) % size:
        raise DataError(f"dimension {dim} of a tensor of shape {tuple(full.shape)} cannot be cut into {size} parts.")
    parts = [half.chunk(size, dim=dim)[rank] for half in halves]
    return torch.cat(parts, dim=dim) if is_gate_up else parts[0]


def tensor_parallel_join(parts: Sequence[Tensor], *, dim: int, is_gate_up: bool = False) -> Tensor:
    """Invert :func:`tensor_parallel_slice`: join the ranks' parts, in rank order."""
    if is_gate_up:
        gates, ups = zip(*(part.chunk(2, dim=dim) for part in parts), strict=True)
        parts = [*gates, *ups]
    return torch.cat(tuple(parts), dim=dim)
