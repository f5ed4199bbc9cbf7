"""Linear layers that multiply by their weight as an engine with int4 weights holds it (``--int4-qat``).

The parameter itself stays what it is: checkpoints, the optimizer and pushes see the exact weight.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.backends.megatron_utils.model_transform import ModelTransform
from slime.backends.megatron_utils.models import family_of_folder
from slime.backends.megatron_utils.parameters import Shard, iter_shards, tensor_parallel_group
from slime.ext.low_precision.rounding import fake_quantize_int4
from slime.ext.low_precision.selection import Int4Selection
from slime.utils.errors import ConfigError


class FakeInt4(ModelTransform):
    """Lets the model's layers read their weights rounded to int4."""

    def after_build(self, chunk: torch.nn.Module) -> None:
        """Change the layers of a chunk.

        Raises:
            ConfigError: a weight cannot be cut into groups on this rank.
        """
        group_size, chosen = self.args.int4_qat_group_size, self._chosen(chunk)
        for module in chunk.modules():
            if id(module._parameters.get("weight")) in chosen:
                kind: Any = type(module)
                module.__class__ = _reading_rounded(kind)
                vars(module).update(int4_group_size=group_size, rounded_weight=None)

    def _chosen(self, chunk: torch.nn.Module) -> set[int]:
        """Return the ``id`` of every parameter to round."""
        args, dims = self.args, model_dims(self.args)
        selection = Int4Selection(args.hf_checkpoint, args.int4_qat_group_size, rounds_dense=args.int4_qat_dense)
        weight_map = family_of_folder(self.args.hf_checkpoint, self.args.model_name).weight_map
        chosen: set[int] = set()
        for shard in iter_shards([chunk]):
            if id(shard.parameter) in chosen:
                continue
            try:
                _, hf_names = weight_map.find(shard.global_name(0, 0), dims)
            except KeyError:  # parameters of a plug-in: no engine has them
                continue
            quantized = [name for name in hf_names if shard.tensor.dim() == 2 and selection.is_quantized(name)]
            if not quantized:
                continue
            if plain := sorted(set(hf_names) - set(quantized)):
                raise ConfigError(
                    f"--int4-qat cannot round {shard.name}, of which {quantized[0]} is int4 and {plain[0]} is not; "
                    "leave the first plain too (--ignore-rules of tools/convert_hf_to_int4_direct.py), or drop "
                    "--int4-qat-dense."
                )
            _require_whole_groups(shard, self.args.int4_qat_group_size)
            chosen.add(id(shard.parameter))
        return chosen


def _require_whole_groups(shard: Shard, group_size: int) -> None:
    """Refuse a shard whose columns, neighbours along the input, do not divide into groups."""
    columns = shard.tensor.size(-1)
    if columns % group_size == 0:
        return
    ranks = tensor_parallel_group(shard).size() if shard.split_dim == 1 else 1
    flag = "--expert-tensor-parallel-size" if shard.is_expert else "--tensor-model-parallel-size"
    cut = f" over {ranks} ranks ({flag})" if ranks > 1 else ""
    raise ConfigError(
        f"{shard.name} has {columns * ranks} columns{cut}, {columns} on each, which are no whole number of groups of "
        f"--int4-qat-group-size {group_size}; use fewer ranks, or a checkpoint with smaller groups."
    )


@cache
def _reading_rounded(layer: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return a subclass whose ``weight`` is rounded, once for each forward pass; its parameters keep their names."""

    def weight(self: Any) -> Tensor:
        if self.rounded_weight is not None:
            return self.rounded_weight
        return fake_quantize_int4(self._parameters["weight"], self.int4_group_size)

    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        self.rounded_weight = fake_quantize_int4(self._parameters["weight"], self.int4_group_size)
        try:
            return layer.forward(self, *arguments, **keywords)
        finally:
            self.rounded_weight = None

    return type(layer.__name__, (layer,), {"weight": property(weight), "forward": forward})
