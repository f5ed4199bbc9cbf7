"""Gathers the shards of a Megatron model into whole tensors under their HF names, one tensor at a time.

Every rank of the model must exhaust the iterators in lockstep: they gather over tensor, expert and (optionally)
pipeline parallelism.  ``megatron_to_hf`` converts names.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import unwrap_model
from torch import Tensor

from slime.backends.megatron_utils.data import current_device
from slime.backends.megatron_utils.megatron_to_hf import HfForm, plain_tensors
from slime.backends.megatron_utils.models.weight_layouts import tensor_parallel_join
from slime.backends.megatron_utils.parameters import Shard, iter_shards, tensor_parallel_group
from slime.utils.distributed_utils import gather_objects
from slime.utils.errors import WeightSyncError
from slime.weights.stacked_experts import join_rows

HostWeights = Mapping[str, Tensor]
"""Host copies by :attr:`Shard.key`, used instead of the live parameters while the trainer sleeps."""


def gather_tensor_parallel(shard: Shard, value: Tensor, *, is_gated: bool) -> Tensor:
    """All-gather ``value``, this rank's part, over the tensor-parallel ranks.

    Args:
        is_gated: the MLP's first matrix concatenates gate and up, each sharded separately.
    """
    group = tensor_parallel_group(shard)
    if group.size() == 1 or shard.split_dim is None:
        return value
    is_joined = is_gate_up(shard, is_gated=is_gated)
    return tensor_parallel_join(_all_gather(value, group), dim=shard.split_dim, is_gate_up=is_joined)


def _all_gather(value: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, value.contiguous(), group=group)
    return parts


def is_gate_up(shard: Shard, *, is_gated: bool) -> bool:
    """Return True for a parameter that concatenates gate and up, which tensor parallelism shards separately."""
    return is_gated and ".linear_fc1." in shard.name


def sent_dtype(shard: Shard, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a parameter is sent: for floats ``dtype`` if given, except parameters kept in fp32."""
    held = shard.tensor.dtype
    stays = "expert_bias" in shard.name or getattr(shard.parameter, "stays_fp32", False)
    return held if dtype is None or not held.is_floating_point or stays else dtype


def whole_shape(shard: Shard) -> torch.Size:
    """Return the shape of the tensor that :func:`gather_tensor_parallel` returns for the shard."""
    shape = list(shard.tensor.shape)
    if shard.split_dim is not None:
        shape[shard.split_dim] *= tensor_parallel_group(shard).size()
    return torch.Size(shape)


def iter_full_tensors(
    model: Sequence[torch.nn.Module],
    *,
    dtype: torch.dtype | None,
    host_weights: HostWeights | None = None,
    across_stages: bool = True,
    only: Container[str] | None = None,
    added: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield global name and whole tensor of every parameter, after model transforms (``served``).  Collective.

    Args:
        dtype: cast floating-point parameters to it, except those kept in fp32; None does not cast.
        host_weights: the values while the trainer sleeps.
        across_stages: give all ranks the parameters of all pipeline stages; otherwise each only its own stage's.
        only: :attr:`Shard.name` of the parameters to yield, the same on all ranks; None for all.
        added: yield the parameters that a transform added, instead of all others.
    """
    config = unwrap_model(model[0]).config
    is_gated = config.gated_linear_unit

    def served(shard: Shard) -> Tensor:
        function = getattr(shard.parameter, "served", Shard.value)
        return function(shard, host_weights).to(shard.tensor.device, non_blocking=True)

    def dtype_of(shard: Shard) -> torch.dtype:
        return sent_dtype(shard, dtype)

    def whole(shard: Shard) -> Tensor:
        return gather_tensor_parallel(shard, served(shard).to(dtype_of(shard)), is_gated=is_gated)

    shards = [shard for shard in iter_shards(model, added=added) if only is None or shard.name in only]
    if across_stages and mpu.get_pipeline_model_parallel_world_size() > 1:
        stream = _across_stages(shards, whole, dtype_of)
    else:
        stream = ((shard, whole(shard)) for shard in shards)
    seen: set[str] = set()
    for shard, full in stream:
        for name, tensor in _across_experts(shard, full, config.num_moe_experts):
            if name not in seen:  # chunks may share a parameter; the first chunk's is used
                seen.add(name)
                yield name, tensor


def _across_stages(
    shards: list[Shard], whole: Callable[[Shard], Tensor], dtype_of: Callable[[Shard], torch.dtype]
) -> Iterator[tuple[Shard, Tensor]]:
    """Yield the tensors of all pipeline stages in order; each stage first announces the tensors it will send.

    A parameter on several stages (a tied embedding) is sent by the first of them.
    """
    group = mpu.get_pipeline_model_parallel_group()
    stage = mpu.get_pipeline_model_parallel_rank()
    ranks = dist.get_process_group_ranks(group)
    headers = [(shard.name, shard.expert_index, whole_shape(shard), dtype_of(shard)) for shard in shards]
    sent: set[tuple[str, int | None]] = set()
    for owner, listed in enumerate(gather_objects(headers, group)):
        for position, (name, expert_index, shape, kind) in enumerate(listed):
            if (name, expert_index) in sent:
                continue
            sent.add((name, expert_index))
            if owner == stage:
                full = whole(shards[position]).contiguous()
                assert (full.shape, full.dtype) == (shape, kind), (name, full.shape, full.dtype, shape, kind)
            else:
                full = torch.empty(shape, dtype=kind, device=current_device())
            dist.broadcast(full, src=ranks[owner], group=group)
            yield Shard(f"{owner}/{name}", name, full, full, expert_index=expert_index), full


def _across_experts(shard: Shard, full: Tensor, num_experts: int | None) -> Iterator[tuple[str, Tensor]]:
    names = names_on_all_ranks(shard, num_experts)
    parts = [full] if len(names) == 1 else _all_gather(full, mpu.get_expert_model_parallel_group())
    return zip(names, parts, strict=True)


def names_on_all_ranks(shard: Shard, num_experts: int | None) -> list[str]:
    """Return the global names of the experts that the expert-parallel ranks hold at this shard's local index."""
    if shard.expert_index is None or num_experts is None:
        return [shard.name]
    num_owners = mpu.get_expert_model_parallel_world_size()
    num_local = num_experts // num_owners
    return [shard.global_name(num_local, owner) for owner in range(num_owners)]


def iter_hf_tensors(
    form: HfForm,
    model: Sequence[torch.nn.Module],
    *,
    dtype: torch.dtype | None,
    host_weights: HostWeights | None = None,
    across_stages: bool = True,
    only: Container[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield HF name and whole tensor of every parameter; arguments as in :func:`iter_full_tensors`.

    Raises:
        WeightSyncError: two parameters convert to the same HF name.
    """
    tensors = iter_full_tensors(model, dtype=dtype, host_weights=host_weights, across_stages=across_stages, only=only)
    return in_hf_names(form, tensors)


def in_hf_names(form: HfForm, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Convert whole tensors one by one, and stack experts that are sent as one tensor.

    Raises:
        WeightSyncError: two parameters convert to the same HF name.
    """
    source: dict[str, str] = {}

    def converted() -> Iterator[tuple[str, Tensor]]:
        for name, full in tensors:
            for hf_name, tensor in plain_tensors(form, name, full):
                if hf_name in source:
                    raise WeightSyncError(
                        f"{name} and {source[hf_name]} both convert to {hf_name}; the converter of model "
                        f"{form.model_name!r} in slime.backends.megatron_utils.megatron_to_hf is wrong"
                    )
                source[hf_name] = name
                yield hf_name, tensor

    return join_rows(converted(), form.dims.num_experts)
