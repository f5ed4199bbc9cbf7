"""Names, shapes and dtypes of all HF tensors of a model, told without moving any.

The order is that in which ``gather`` gives the tensors themselves.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu
from megatron.core.utils import unwrap_model

from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf
from slime.backends.megatron_utils.parameters import iter_shards
from slime.backends.megatron_utils.update_weight.sources.gather import GLOBAL_PREFIX, sent_dtype, whole_shape
from slime.utils.errors import WeightSyncError

StageHeaders = list[tuple[str, tuple[int, ...], torch.dtype]]
"""HF name, whole shape and dtype of the tensors of one pipeline stage."""


def hf_headers(
    args: Namespace,
    model: Sequence[torch.nn.Module],
    *,
    model_name: str,
    dtype: torch.dtype | None,
    only: Container[str] | None = None,
) -> list[StageHeaders]:
    """The headers of every pipeline stage, the same on all ranks.  Collective over the pipeline.

    A tensor that several stages hold (a tied embedding) is listed by the first of them.

    Args:
        args: complete flags.
        model: this rank's chunks.
        model_name: chooses the name converter.
        dtype: as ``gather.iter_full_tensors`` takes it.
        only: likewise.

    Raises:
        WeightSyncError: two parameters of a stage convert to the same HF name.
    """
    own = list(_megatron_headers(model, dtype, only))
    stages: list[Any] = [own]
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        group = mpu.get_pipeline_model_parallel_group()
        stages = [None] * group.size()
        dist.all_gather_object(stages, own, group=group)
    result: list[StageHeaders] = []
    sent: set[str] = set()
    for listed in stages:
        headers: StageHeaders = []
        source: dict[str, str] = {}
        for name, shape, kind in listed:
            if name in sent:
                continue
            sent.add(name)
            empty = torch.empty(shape, dtype=kind, device="meta")
            for hf_name, tensor in convert_to_hf(args, model_name, GLOBAL_PREFIX + name, empty):
                if hf_name in source:
                    raise WeightSyncError(
                        f"{name} and {source[hf_name]} both convert to {hf_name}; the converter of model "
                        f"{model_name!r} in slime.backends.megatron_utils.megatron_to_hf is wrong"
                    )
                source[hf_name] = name
                headers.append((hf_name, tuple(tensor.shape), tensor.dtype))
        result.append(headers)
    return result


def _megatron_headers(
    model: Sequence[torch.nn.Module], dtype: torch.dtype | None, only: Container[str] | None
) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """Global name, whole shape and dtype of this stage's parameters, those of all expert ranks included."""
    num_experts = unwrap_model(model[0]).config.num_moe_experts
    seen: set[str] = set()
    for shard in iter_shards(model):
        if only is not None and shard.name not in only:
            continue
        names = [shard.name]
        if shard.expert_index is not None and num_experts is not None:
            num_owners = mpu.get_expert_model_parallel_world_size()
            num_local = num_experts // num_owners
            names = [shard.name.format(owner * num_local + shard.expert_index) for owner in range(num_owners)]
        for name in names:
            if name not in seen:  # chunks may share a parameter: the first one's counts
                seen.add(name)
                yield name, tuple(whole_shape(shard)), sent_dtype(shard.name, shard.tensor.dtype, dtype)
