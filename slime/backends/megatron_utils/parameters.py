"""This rank's parameters under global names.

Layers are counted over all pipeline stages and experts over all expert-parallel ranks, so a name means the same
parameter on every rank and in every parallel layout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import unwrap_model
from torch import Tensor

from slime.backends.megatron_utils.model_transform import added_parameters
from slime.utils.distributed_utils import get_gloo_group
from slime.weights.digest import MASK_64, WORD_BYTES, as_signed, digest_tensor, mix

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
_LOCAL_EXPERT = re.compile(r"^(.*\.experts)\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$")
_GROUPED_EXPERT = re.compile(r"^(.*\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)$")


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of one parameter (or of a buffer that an engine needs)."""

    key: str
    """``{chunk}.{name in the chunk}``: unique on this rank, except for experts stacked in one parameter."""
    name: str
    """Name in the whole model without a prefix; ``{}`` is replaced by the expert's index."""
    tensor: Tensor
    """The live parameter, or this expert's slice of a stacked one; its values are gone while the trainer sleeps."""
    parameter: Any
    """The live parameter, with its ``main_grad``."""
    split_dim: int | None = None
    """Dimension that tensor parallelism shards; None if every rank holds the whole tensor."""
    expert_index: int | None = None
    """Index among the experts of this rank; None for a parameter that does not belong to an expert."""
    is_stacked: bool = False
    """The live parameter stacks all experts of this rank in its first dimension."""

    @property
    def is_expert(self) -> bool:
        return self.expert_index is not None

    def part_of(self, value: Tensor) -> Tensor:
        """Return this shard's part of a tensor shaped like the live parameter: a host copy, a gradient."""
        return value[self.expert_index] if self.is_stacked else value

    def value(self, host_weights: Mapping[str, Tensor] | None) -> Tensor:
        """Return the parameter's values, from host copies (by :attr:`key`) if given."""
        return self.tensor.detach() if host_weights is None else self.part_of(host_weights[self.key])

    def global_name(self, num_local_experts: int, expert_rank: int) -> str:
        """Return the name with the expert's global index."""
        if self.expert_index is None:
            return self.name
        return self.name.format(expert_rank * num_local_experts + self.expert_index)


def iter_shards(
    model: Sequence[torch.nn.Module], *, with_copies: bool = False, added: bool = False
) -> Iterator[Shard]:
    """Yield this rank's parameters, and its expert-bias buffers, under global names.

    Args:
        with_copies: include the last pipeline stage's copy of a tied embedding, ``output_layer.weight``.
        added: yield the parameters that a transform added, instead of all others.
    """
    transform = added_parameters(model)
    for chunk_index, chunk in enumerate(model):
        inner = unwrap_model(chunk)
        # Layer i of this stage is layer ``layer_number - 1`` of the model.
        decoder = getattr(inner, "decoder", None)
        layers = [layer.layer_number - 1 for layer in decoder.layers] if decoder is not None else []
        shares_embedding = getattr(inner, "share_embeddings_and_output_weights", False)
        if added:
            named: list[tuple[str, Tensor]] = [] if transform is None else list(transform.named_parameters(inner))
        else:
            named = [item for item in inner.named_parameters() if transform is None or not transform.owns(item[0])]
            named += [(name, buffer) for name, buffer in inner.named_buffers() if "expert_bias" in name]
        for local_name, tensor in named:
            if shares_embedding and local_name == "output_layer.weight" and not with_copies:
                continue
            match = _LAYER.match(local_name)
            name = f"decoder.layers.{layers[int(match[1])]}.{match[2]}" if match else local_name
            yield from _shards_of(f"{chunk_index}.{local_name}", name, tensor)


def constant_parameters(model: Sequence[torch.nn.Module]) -> frozenset[str]:
    """Return the names (:attr:`Shard.name`) of this rank's parameters that each engine needs only once."""
    marked = (shard for shard in iter_shards(model) if hasattr(shard.parameter, "is_constant_when_frozen"))
    return frozenset(shard.name for shard in marked if not shard.parameter.requires_grad)


def _shards_of(key: str, name: str, tensor: Any) -> Iterator[Shard]:
    """Yield one shard, or one per expert stacked in ``tensor``."""
    split_dim = None
    if getattr(tensor, "tensor_model_parallel", False) and getattr(tensor, "parallel_mode", None) != "duplicated":
        split_dim = tensor.partition_dim
    if getattr(tensor, "is_stacked_experts", False):
        held = tensor
        if not tensor.untyped_storage().nbytes():  # the trainer sleeps, and torch cannot make views of it
            held = tensor.detach().new_full((), math.nan).expand(tensor.shape)
        for index in range(tensor.size(0)):
            dim = None if split_dim is None else split_dim - 1
            yield Shard(key, f"{name}{{}}", held[index], tensor, dim, expert_index=index, is_stacked=True)
        return
    expert_index = None
    if match := _LOCAL_EXPERT.match(name):
        name, expert_index = f"{match[1]}.{match[3]}.{match[4]}{{}}", int(match[2])
    elif match := _GROUPED_EXPERT.match(name):
        name, expert_index = f"{match[1]}.{match[2]}.{match[3]}{{}}", int(match[4])
    if expert_index is not None and split_dim is not None and ".linear_fc2.weight" in name:
        split_dim = 1  # megatron-core's experts report dimension 0, but the input dimension is sharded
    yield Shard(key, name, tensor, tensor, split_dim, expert_index)


def iter_global_parameters(
    model: Sequence[torch.nn.Module], *, with_copies: bool = False, added: bool = False
) -> Iterator[tuple[str, Shard]]:
    """Yield each shard of :func:`iter_shards` with its global name, which includes the expert's index."""
    shards = list(iter_shards(model, with_copies=with_copies, added=added))
    num_local = 1 + max((shard.expert_index for shard in shards if shard.expert_index is not None), default=-1)
    expert_rank = mpu.get_expert_model_parallel_rank() if num_local else 0
    for shard in shards:
        yield shard.global_name(num_local, expert_rank), shard


def tensor_parallel_group(shard: Shard) -> torch.distributed.ProcessGroup:
    """Return the group over which a shard's parameter is sharded: experts have another one."""
    return mpu.get_expert_tensor_parallel_group() if shard.is_expert else mpu.get_tensor_model_parallel_group()


@torch.no_grad()
def weights_digest(model: Sequence[torch.nn.Module]) -> str:
    """Return a digest of the trained parameters of all ranks, 16 hexadecimal digits.  Collective.

    It is cheap enough for every step: it digests column sums of the parameters' 64-bit words, in 256 and in 251
    columns, computed on the device at memory speed.  Equal weights in another parallel layout have another digest.
    """
    weights = [weight for chunk in model for weight in chunk.parameters() if weight.requires_grad and weight.numel()]
    own = digest_tensor(torch.stack([_column_sums(part) for part in _joined(weights)]).cpu()) if weights else 0
    total = torch.tensor([as_signed(mix(own, dist.get_rank()))], dtype=torch.int64)
    dist.all_reduce(total, group=get_gloo_group())  # the sum of int64 wraps
    return f"{int(total) & MASK_64:016x}"


_COLUMNS = (256, 251)
"""Coprime, so that words swapped within a column of one layout are in different columns of the other."""


def _joined(weights: Sequence[Tensor], max_bytes: int = 2**26) -> Iterator[Tensor]:
    """Yield the weights as flat uint8, small ones concatenated up to ``max_bytes`` to save kernel launches."""
    held, num_bytes = list[Tensor](), 0
    for weight in weights:
        flat = weight.detach().contiguous().view(-1).view(torch.uint8)
        if held and num_bytes + len(flat) > max_bytes:
            yield torch.cat(held) if len(held) > 1 else held[0]
            held, num_bytes = [], 0
        held.append(flat)
        num_bytes += len(flat)
    yield torch.cat(held) if len(held) > 1 else held[0]


def _column_sums(flat: Tensor) -> Tensor:
    """Return [256 + 251] int64: the wrapping column sums of the 64-bit words of flat uint8."""
    if flat.storage_offset() % WORD_BYTES:
        flat = flat.clone()
    words = flat[: flat.numel() // WORD_BYTES * WORD_BYTES].view(torch.int64)
    sums = []
    for columns in _COLUMNS:
        num_whole = len(words) // columns * columns
        by_column = words[:num_whole].view(-1, columns).sum(0)
        by_column[: len(words) - num_whole] += words[num_whole:]
        sums.append(by_column)
    rest = flat[len(words) * WORD_BYTES :]
    sums[0][: len(rest)] += rest.long() * 257
    return torch.cat(sums)
