"""Adapters on the linear layers of a built model (``slime.ext.lora.formula`` has the formula).

An adapter is a submodule ``lora`` of the layer, with parameters ``a`` and ``b``; a hook adds its output to the
layer's.  Names of all other parameters stay what they are.  A is cut as the columns of the weight are, B as its rows:

    layer             A [P, r, K]     B [N, r]       between the two
    column parallel   whole           cut            gathered under sequence parallelism
    row parallel      cut             whole          summed over the tensor-parallel ranks
    replicated        whole           whole          nothing
    stacked experts   whole or cut    cut or whole   nothing: the token dispatcher adds the ranks' summands
    shared by experts whole           whole          as above; each rank takes the part for its share of the experts

Gradients of what experts share are summed over all ranks, as those of a norm are under sequence parallelism.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from slime.backends.megatron_utils.hf_to_megatron import local_part
from slime.backends.megatron_utils.layers.experts import StackedLinear, grouped_linear
from slime.backends.megatron_utils.layers.latent_attention import ReplicatedLinear
from slime.backends.megatron_utils.models.rule import Rule
from slime.backends.megatron_utils.parameters import Shard, iter_global_parameters, tensor_parallel_group
from slime.ext.lora.flags import LoraConfig
from slime.ext.lora.formula import merged, widened
from slime.ext.lora.frozen_base import value_of
from slime.ext.lora.state import AdapterTable
from slime.ext.lora.targets import chosen_parts, has_adapter
from slime.train_data.model_dims import ModelDims
from slime.utils.errors import ConfigError

_LAYERS: tuple[type, ...] = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear, StackedLinear)


Held: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
"""A and B; with G adapters side by side each has an axis [G, ..] in front, and the third, [G] integers on the host,
counts the rows of the input that belong to each."""


class Adapter(torch.nn.Module):
    """The adapter of one linear layer on this rank.

    Args:
        layer: a column-parallel, row-parallel or replicated linear layer, or stacked experts.
        config: rank, scale, dropout.
        num_parts: matrices of the checkpoint in the layer's weight that have an adapter.
        part_of_row: [rows on this rank], see ``widened``.
        own_rows: [rows on this rank] among those of a whole expert, for an adapter that experts share.
    """

    a: torch.nn.Parameter
    b: torch.nn.Parameter

    def __init__(
        self,
        layer: Any,
        config: LoraConfig,
        num_parts: int,
        part_of_row: Tensor | None,
        own_rows: Tensor | None = None,
    ) -> None:
        super().__init__()
        weight = layer.weight
        self.kind, self.scale, self.dropout = type(layer), config.scale, config.dropout
        self.part_of_row: Tensor | None
        self.register_buffer("part_of_row", part_of_row, persistent=False)
        self.own_rows: Tensor | None
        self.register_buffer("own_rows", own_rows, persistent=False)
        cuts_rows = self.kind is ColumnParallelLinear
        cuts_columns = self.kind is RowParallelLinear
        self.held: Held | None = None
        """Numbers to compute with in place of the parameters'."""
        self.is_shared = own_rows is not None
        self.sequence_parallel = False
        *experts, rows, columns = weight.shape
        if self.kind is StackedLinear:
            cuts_rows, cuts_columns = layer.split_axis == 1, layer.split_axis == 2
            self.group = layer.groups.expt_tp
            self.use_grouped_product = layer.use_grouped_product
        if self.is_shared:
            num_cuts = self.group.size()
            experts, rows, columns = [], rows * num_cuts**cuts_rows, columns * num_cuts**cuts_columns
        self.a = torch.nn.Parameter(weight.new_empty(*experts, num_parts, config.rank, columns))
        self.b = torch.nn.Parameter(weight.new_zeros(*experts, rows, config.rank))
        self.cuts_rows, self.cuts_columns = cuts_rows, cuts_columns
        if self.is_shared:
            for parameter in self.parameters():
                vars(parameter)["sequence_parallel"] = True  # has gradients of other tokens or parts on each rank
            return
        if self.kind is StackedLinear:
            # Other experts on every tensor-parallel rank: megatron-core must count the gradients of all of them.
            counts_all = self.group.size() == 1
            for parameter in self.parameters():
                vars(parameter).update(allreduce=weight.allreduce, is_stacked_experts=True)
        else:
            counts_all = False
            source = layer.weight if self.kind is ReplicatedLinear else layer
            self.sequence_parallel = source.sequence_parallel
            self.group = getattr(layer, "tp_group", None)
        for parameter, is_cut, dim in ((self.a, cuts_columns, self.a.dim() - 1), (self.b, cuts_rows, len(experts))):
            if is_cut or counts_all:
                set_tensor_model_parallel_attributes(parameter, True, dim, 1)
            if not is_cut:
                # Each tensor-parallel rank has some of the tokens: megatron-core sums such gradients.
                vars(parameter)["sequence_parallel"] = self.sequence_parallel

    def forward(self, x: Tensor, tokens_per_expert: Tensor | None = None) -> Tensor:
        """Return what is added to the output of the layer, whose inputs these are."""
        x = self._dropped(x)
        a, b, rows = self.held or (self.a, self.b, None)
        if tokens_per_expert is not None:
            return self._of_experts(x, a, b, tokens_per_expert)
        z = _product(x, a.flatten(-3, -2), rows)
        if self.cuts_rows and self.sequence_parallel:
            z = gather_from_sequence_parallel_region(z, tensor_parallel_output_grad=True, group=self.group)
        elif self.cuts_rows:
            z = copy_to_tensor_model_parallel_region(z, group=self.group)
        elif self.cuts_columns and self.sequence_parallel:
            z = reduce_scatter_to_sequence_parallel_region(z, group=self.group)
        elif self.cuts_columns:
            z = reduce_from_tensor_model_parallel_region(z, group=self.group)
        return _product(self.scale * z, widened(b, self.part_of_row, a.size(-3)), rows)

    def own_part(self, shard: Shard, a: Tensor, b: Tensor, own_rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the part of the adapter's matrices that belongs to a shard of the layer's weight."""
        return self._cut(a, b, own_rows) if self.is_shared else (shard.part_of(a), shard.part_of(b))

    def _cut(self, a: Tensor, b: Tensor, own_rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return this rank's part of matrices that experts share."""
        if self.cuts_columns:
            a = a.chunk(self.group.size(), dim=-1)[self.group.rank()]
        return a, b[own_rows] if self.cuts_rows else b

    def _of_experts(self, x: Tensor, a: Tensor, b: Tensor, tokens_per_expert: Tensor) -> Tensor:
        if self.is_shared:
            a, b = self._cut(a, b, self.own_rows)
            return F.linear(self.scale * F.linear(x, a.flatten(0, 1)), widened(b, self.part_of_row, a.size(0)))
        # What is whole meets a share of rows or columns on each rank: its gradient is the sum over the ranks.
        if self.cuts_rows:
            a = copy_to_tensor_model_parallel_region(a, group=self.group)
        else:
            b = copy_to_tensor_model_parallel_region(b, group=self.group)
        b = widened(b, self.part_of_row, a.size(1))
        for matrix in (a.flatten(1, 2), b):
            x = grouped_linear(x, matrix, tokens_per_expert, use_grouped_product=self.use_grouped_product)
        return self.scale * x

    def _dropped(self, x: Tensor) -> Tensor:
        if not self.dropout or not self.training:
            return x
        if not (self.cuts_columns or self.sequence_parallel):
            return F.dropout(x, self.dropout)  # the same tokens on all tensor-parallel ranks: the same mask
        with get_cuda_rng_tracker().fork():
            return F.dropout(x, self.dropout)

    @torch.no_grad()
    def draw(self, name: str, shard: Shard, seed: int) -> None:
        """Fill A (of one expert) as PEFT does, U(-1/sqrt(K), 1/sqrt(K)), the same in every layout; B is zero.

        Args:
            name: of the weight in the whole model, without a number where experts share the adapter.
            shard: the weight.
            seed: of the run.
        """
        part = self.a if self.is_shared else shard.part_of(self.a)
        is_cut = self.cuts_columns and not self.is_shared
        size, rank = (self.group.size(), self.group.rank()) if is_cut else (1, 0)
        columns = part.size(-1) * size
        generator = torch.Generator().manual_seed(seed * 2**32 + zlib.crc32(name.encode()))
        whole = torch.empty(*part.shape[:-1], columns).uniform_(-1, 1, generator=generator) / math.sqrt(columns)
        part.copy_(whole.chunk(size, dim=-1)[rank])


def add_adapters(model: torch.nn.Module, table: AdapterTable, *, seed: int) -> None:
    """Freeze a chunk of the actor and put adapters on the chosen linear layers of its decoder.

    Args:
        model: bare, not wrapped.
        table: of the run's adapters.
        seed: of their first numbers.

    Raises:
        ConfigError: a chosen weight is in no layer that can have an adapter.
    """
    model.requires_grad_(False)
    config, dims = table.config, table.dims
    layers: dict[int, Any] = {
        id(layer._parameters.get("weight")): layer for layer in model.modules() if type(layer) in _LAYERS
    }
    for name, shard in iter_global_parameters([model]):
        if not has_adapter(table.weight_map, name):
            continue
        rule, hf_names = table.weight_map.find(name, dims)
        chosen = chosen_parts(config, name, hf_names)
        layer = layers.get(id(shard.parameter))
        if not any(chosen):
            continue
        if layer is None:
            raise ConfigError(
                f"--lora-target-modules chooses {name}, whose layer knows no adapters; name others, not all-linear."
            )
        if shard.expert_index in (None, 0):
            part_of_row = None if len(chosen) == 1 else _parts_of_rows(shard, rule, dims, chosen)
            is_shared = config.shares_experts and type(layer) is StackedLinear
            own_rows = _own_rows(shard, dims).to(shard.tensor.device) if is_shared else None
            layer.lora = Adapter(layer, config, sum(chosen), part_of_row, own_rows)
            vars(layer.weight).update(lora=layer.lora, served=served_value)
            layer.register_forward_hook(_add_output)
    draw_adapters([model], seed=seed)
    found = [(name, one) for name, one in model.named_modules() if isinstance(one, Adapter)]
    vars(model)["adapters"] = found  # a push would look through the whole model
    head = getattr(model, "output_layer", None)
    if head is not None:
        head.register_forward_hook(_with_dense_gradient)


@torch.no_grad()
def draw_adapters(model: Sequence[torch.nn.Module], *, seed: int, rank: int | None = None) -> None:
    """Give the adapters their first numbers: A drawn, B zero.

    Args:
        model: chunks, bare or wrapped.
        seed: of the numbers.
        rank: A is zero beyond its first ``rank`` rows; such an adapter trains as one of this rank.  None: all.
    """
    for name, shard in iter_global_parameters(model):
        adapter: Adapter | None = getattr(shard.parameter, "lora", None)
        if adapter is None:
            continue
        adapter.b.zero_()
        if not adapter.is_shared:
            adapter.draw(name, shard, seed)
        elif shard.expert_index == 0:
            adapter.draw(shard.name, shard, seed)
        if rank is not None:
            adapter.a[..., rank:, :] = 0


def _parts_of_rows(shard: Shard, rule: Rule, dims: ModelDims, chosen: Sequence[bool]) -> Tensor:
    """Return for each row of a weight on this rank which of the chosen parts it belongs to; -1 for none."""
    num_rows = _num_rows(shard)
    parts = rule.split(torch.arange(num_rows)[:, None], dims)
    part_of_row = torch.full((num_rows,), -1)
    for index, rows in enumerate(part for part, is_chosen in zip(parts, chosen, strict=True) if is_chosen):
        part_of_row[rows.flatten()] = index
    return part_of_row[_own_rows(shard, dims)].to(shard.tensor.device)


def _num_rows(shard: Shard) -> int:
    """Return the rows of a weight, those of all ranks together."""
    return shard.tensor.size(0) * (tensor_parallel_group(shard).size() if shard.split_dim == 0 else 1)


def _own_rows(shard: Shard, dims: ModelDims) -> Tensor:
    """Return which of a weight's rows are on this rank, [rows on this rank]."""
    rows = torch.arange(_num_rows(shard))[:, None]
    return (local_part(shard, rows, is_gated=dims.is_gated) if shard.split_dim == 0 else rows).flatten()


def _product(x: Tensor, matrix: Tensor, rows: Tensor | None) -> Tensor:
    if rows is None:
        return F.linear(x, matrix)
    return grouped_linear(x.flatten(0, -2), matrix, rows, use_grouped_product=True).view(*x.shape[:-1], -1)


def _add_output(layer: Any, inputs: tuple[Any, ...], output: Any) -> Any:
    added = layer.lora(*inputs)
    return (output[0] + added, *output[1:]) if isinstance(output, tuple) else output + added


def _with_dense_gradient(layer: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> None:
    """Give the gradient of the logits [s, b, V] the strides of a new tensor.

    It comes transposed from [b, s, V]; by a weight without a gradient ``torch.matmul`` then makes s products of one
    row: 2.5 s for 16,384 tokens and 151,936 entries on an H200, in place of 0.03 s.
    """
    if output[0].requires_grad:
        output[0].register_hook(lambda gradient: gradient.flatten(0, 1).view(gradient.shape))


def served_value(shard: Shard, host_weights: Mapping[str, Tensor] | None) -> Tensor:
    """Return this rank's part of a weight with its adapter added.

    Args:
        shard: the weight.
        host_weights: where its numbers and those of the adapter are while the parameters are asleep.
    """
    adapter: Adapter | None = getattr(shard.parameter, "lora", None)
    value = value_of(shard, host_weights).to(shard.tensor.device, non_blocking=True)
    if adapter is None:
        return value
    held: dict[str, Tensor] = dict([*adapter.named_parameters(), *adapter.named_buffers()])
    if host_weights is not None:
        prefix = shard.key.removesuffix("weight") + "lora."
        held = {name: host_weights[prefix + name].to(value.device) for name in held}
    a, b = adapter.own_part(shard, held["a"].detach(), held["b"].detach(), held.get("own_rows"))
    return merged(value, a, b, held.get("part_of_row"), adapter.scale)
