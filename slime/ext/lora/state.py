"""The adapters of a model on disk: entries of a checkpoint, and PEFT's folders.

In a checkpoint a tensor has its Megatron name, layers counted over the whole model, and the shape of the whole
parameter, so that it is read in any layout.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory

from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.backends.megatron_utils.hf_to_megatron import local_part
from slime.backends.megatron_utils.layers.experts import gate_up_entry
from slime.backends.megatron_utils.models import family_of_folder
from slime.backends.megatron_utils.models.rule import Rule, WeightMap
from slime.backends.megatron_utils.parameters import (
    Shard,
    iter_global_parameters,
    tensor_parallel_group,
)
from slime.backends.megatron_utils.update_weight.gather import (
    HostWeights,
    is_gate_up,
    iter_full_tensors,
    whole_shape,
)
from slime.ext.lora.flags import LoraConfig, lora_config
from slime.ext.lora.peft_folder import read_peft_folder, tensor_name, write_peft_folder
from slime.ext.lora.targets import chosen_parts
from slime.train_data.model_dims import ModelDims
from slime.utils.distributed_utils import init_gloo_group
from slime.utils.errors import DataError
from slime.weights.named_tensors import check_finite

_NAME = re.compile(r"(.+)\.lora\.([ab])(\d*)")


def sharded_entry(key: str, shard: Shard, *, is_gated: bool) -> ShardedTensor | ShardedTensorFactory:
    """Return what a checkpoint has under ``key`` for a parameter of an adapter."""
    group = tensor_parallel_group(shard)
    rank, parts = group.rank(), group.size()
    dim = shard.split_dim
    experts: list[tuple[int, int, int]] = []
    data_rank = mpu.get_data_parallel_rank(with_context_parallel=True)
    if shard.is_stacked:
        dim = None if dim is None else dim + 1
        experts = [(0, mpu.get_expert_model_parallel_rank(), mpu.get_expert_model_parallel_world_size())]
        data_rank = mpu.get_expert_data_parallel_rank()
    parameter = shard.parameter

    def entry(key: str, tensor: Tensor, replica_id: ReplicaId, *cut: tuple[int, int, int]) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, tensor, *experts, *cut, replica_id=replica_id)

    if dim is None:
        return entry(key, parameter, (0, rank, data_rank))
    replica_id, cut = (0, 0, data_rank), (dim, rank, parts)
    if key.endswith(".b") and is_gate_up(shard, is_gated=is_gated):
        return gate_up_entry(key, parameter, replica_id, cut, entry, dim=dim)
    return entry(key, parameter, replica_id, cut)


def iter_peft_tensors(
    table: AdapterTable,
    model: Sequence[torch.nn.Module],
    *,
    host_weights: HostWeights | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters, whole and under PEFT's names.  Collective.

    Args:
        table: of the run's adapters.
        model: this rank's chunks.
        host_weights: instead of the live parameters, by :attr:`Shard.key`.
        dtype: of what is yielded; None for the parameters' own.
    """
    for name, tensor in iter_full_tensors(model, dtype=dtype, host_weights=host_weights, added=True):
        matrix, weights = table.peft_names(name)
        for rule, names in weights:
            parts = tensor.unbind(0) if matrix == "a" else rule.split(tensor, table.dims)
            for peft_name, part in zip(names, parts, strict=True):
                if peft_name is not None:
                    yield peft_name, part


def peft_tensors(
    table: AdapterTable,
    model: Sequence[torch.nn.Module],
    *,
    host_weights: HostWeights | None = None,
    dtype: torch.dtype | None = None,
    device: str | None = "cpu",
) -> dict[str, Tensor]:
    """Return on rank 0 what :func:`iter_peft_tensors` yields, as copies on ``device``; {} on others.  Collective.

    ``device`` None leaves them as they are, parts of the live parameters among them.
    """
    is_main, tensors = dist.get_rank() == 0, {}
    for name, tensor in iter_peft_tensors(table, model, host_weights=host_weights, dtype=dtype):
        if is_main:  # the gathering needs all ranks
            tensors[name] = tensor if device is None else tensor.to(device, copy=True)
    return tensors


def save_peft(table: AdapterTable, folder: str | Path, model: Sequence[torch.nn.Module], *, base_model: str) -> None:
    """Write the adapters as a PEFT folder.  Collective; rank 0 writes."""
    tensors = peft_tensors(table, model)
    if dist.get_rank() == 0:
        write_peft_folder(Path(folder), tensors, table.config, base_model=base_model, flag="--lora-save")
    dist.barrier(group=init_gloo_group())


def load_peft(table: AdapterTable, model: Sequence[torch.nn.Module], folder: str | Path) -> None:
    """Fill the adapters from a PEFT folder.  Collective.

    Raises:
        DataError: it has other modules than this run's adapters, or tensors of other shapes.
    """
    tensors = read_peft_folder(folder, table.config, flag=f"--lora-load {folder}")
    fill_adapters(table, model, tensors, source=f"--lora-load {folder}")


@torch.no_grad()
def fill_adapters(
    table: AdapterTable,
    model: Sequence[torch.nn.Module],
    tensors: Mapping[str, Tensor],
    *,
    source: str,
    into: HostWeights | None = None,
    rank: int | None = None,
) -> None:
    """Fill the adapters from tensors by PEFT's names.  Collective.

    Args:
        table: of the run's adapters.
        model: this rank's chunks.
        tensors: all of them.
        source: of the tensors, for errors.
        into: filled instead of the live parameters, by :attr:`Shard.key`.
        rank: of the tensors; the adapters' other ranks become zeros.  None: the adapters'.

    Raises:
        DataError: they are of other modules than this run's adapters, or have other shapes.
    """
    rank = table.config.rank if rank is None else rank
    read: set[str] = set()

    def get(module: str, matrix: str, shape: Sequence[int]) -> Tensor:
        name = tensor_name(module, matrix)
        wanted = [rank, *shape[1:]] if matrix == "A" else [*shape[:-1], rank]
        found = tensors.get(name)
        if found is None or list(found.shape) != wanted:
            has = "nothing" if found is None else list(found.shape)
            raise DataError(
                f"{source} has {has} for {name}, which is {wanted} in this run; compare "
                "--lora-target-modules with target_modules of its adapter_config.json, and the model."
            )
        check_finite(found, f"{source}: {name}")
        read.add(name)
        missing = table.config.rank - rank
        return F.pad(found, (0, 0, 0, missing) if matrix == "A" else (0, missing))

    def whole(weight: str, matrix: str, shape: torch.Size) -> Tensor:
        rule, modules = table.find(weight)
        if matrix == "a":
            return torch.stack([get(module, "A", shape[1:]) for module in modules if module is not None])
        empty = rule.split(torch.zeros(shape), table.dims)
        parts = [
            rows if module is None else get(module, "B", rows.shape)
            for module, rows in zip(modules, empty, strict=True)
        ]
        return rule.merge(*parts, table.dims)

    for name, shard in iter_global_parameters(model, added=True):
        (weight, *others), matrix = table.weights_of(name)
        value = whole(weight, matrix, whole_shape(shard))
        for other in others:
            if not torch.equal(whole(other, matrix, whole_shape(shard)), value):
                raise DataError(
                    f"{source} has other numbers for {other} than for {weight}, which share an adapter "
                    "with --lora-experts shared; use --lora-experts each."
                )
        shard.value(into).copy_(local_part(shard, value, is_gated=table.dims.is_gated))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, read, group=init_gloo_group())
    if unread := sorted(tensors.keys() - set().union(*everyone)):
        raise DataError(
            f"{source} has {len(unread)} tensors for which this run has no adapter, such as {unread[0]}; "
            "choose its modules with --lora-target-modules."
        )


class AdapterTable:
    """The correspondence of a run's adapters and Hugging Face modules."""

    def __init__(self, weight_map: WeightMap, config: LoraConfig, dims: ModelDims) -> None:
        self.weight_map, self.config, self.dims = weight_map, config, dims
        self._names: dict[str, tuple[str, list[tuple[Rule, list[str | None]]]]] = {}

    def find(self, weight: str) -> tuple[Rule, list[str | None]]:
        """Return the rule of a weight, and for each of its HF tensors the module, or None where it has no adapter."""
        rule, hf_names = self.weight_map.find(weight, self.dims)
        chosen = chosen_parts(self.config, weight, hf_names)
        return rule, [
            name.removesuffix(".weight") if is_chosen else None
            for name, is_chosen in zip(hf_names, chosen, strict=True)
        ]

    def weights_of(self, name: str) -> tuple[list[str], str]:
        """Return the weights that an adapter's parameter belongs to, all that share it, and ``a`` or ``b``."""
        match = _NAME.fullmatch(name)
        assert match is not None, name
        numbers = range(self.dims.num_experts) if ".mlp.experts." in name and not match[3] else [match[3]]
        return [f"{match[1]}.weight{number}" for number in numbers], match[2]

    def peft_names(self, name: str) -> tuple[str, list[tuple[Rule, list[str | None]]]]:
        """Return ``a`` or ``b``, and for each weight the rule and PEFT's names of an adapter's parts.

        An ``a`` has parts for modules with an adapter alone; a ``b`` for the others too, whose name is None.
        """
        if name not in self._names:  # pushes repeat
            weights, matrix = self.weights_of(name)
            found = []
            for rule, modules in map(self.find, weights):
                kept = modules if matrix == "b" else [module for module in modules if module is not None]
                found.append((rule, [module and tensor_name(module, matrix.upper()) for module in kept]))
            self._names[name] = matrix, found
        return self._names[name]


def adapter_table(args: Namespace) -> AdapterTable:
    """Return the table of a run that has adapters."""
    config = lora_config(args)
    assert config is not None
    return AdapterTable(family_of_folder(args.hf_checkpoint, args.model_name).weight_map, config, model_dims(args))
