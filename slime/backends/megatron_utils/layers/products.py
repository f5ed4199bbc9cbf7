"""Replaces the matrix products of a layer's linear modules by other implementations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from slime.backends.megatron_utils.layers.experts import StackedLinear
from slime.backends.megatron_utils.layers.latent_attention import ReplicatedLinear


def matrices(layer: TransformerLayer) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Yield (owner, name, module) of the layer's linear modules, except subclasses, which define their own forward."""
    for owner in layer.modules():
        for name, module in owner.named_children():
            if type(module) in (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear, StackedLinear):
                yield owner, name, module


class Products(Protocol):
    """An implementation of the product with a layer's weight."""

    def product(self, x: Tensor, weight: Tensor, index: int = 0) -> Tensor:
        """Return ``x @ weight.T``, [T, N].  The weight is the layer's, or that of its expert ``index``."""


def linear(
    rows: Products,
    input: Tensor,  # noqa: A002 - the names are Megatron's
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    allreduce_dgrad: bool = False,
    sequence_parallel: bool = False,
    tp_group: Any = None,
    **unused: Any,
) -> Tensor:
    """Replace a Megatron linear layer's ``_forward_impl``; the gathered input is kept for the backward pass."""
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    y = rows.product(input.flatten(0, -2), weight).unflatten(0, input.shape[:-1])
    return y if bias is None else y + bias


def experts_linear(rows: Products, module: StackedLinear, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Replace ``StackedLinear.forward`` by one product per expert, which needs the counts on the host."""
    counts = tokens_per_expert.tolist()
    pairs = zip(x.split(counts), module.weight.unbind(0), strict=True)
    return torch.cat([rows.product(tokens, matrix, index) for index, (tokens, matrix) in enumerate(pairs)])


def replicated_linear(rows: Products, module: ReplicatedLinear, x: Tensor) -> Tensor:
    """Replace ``ReplicatedLinear.forward``."""
    return rows.product(x.flatten(0, -2), module.weight).unflatten(0, x.shape[:-1])


def multiply_by(rows: Products, module: torch.nn.Module) -> None:
    """Make a linear module of :func:`matrices` compute its products with ``rows``."""
    if isinstance(module, StackedLinear):
        vars(module)["forward"] = partial(experts_linear, rows, module)
    elif isinstance(module, ReplicatedLinear):
        vars(module)["forward"] = partial(replicated_linear, rows, module)
    else:
        vars(module)["_forward_impl"] = partial(linear, rows)
