"""``--save-debug-train-data``: the rollout's columns from all ranks, as one file."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.backends.megatron_utils.cp_utils import all_gather_with_cp
from slime.backends.megatron_utils.data import sample_columns
from slime.backends.megatron_utils.train_metrics import TOKEN_COLUMNS
from slime.observability.train_dump import LAYOUT, save_train_dump
from slime.utils.distributed_utils import get_gloo_group
from slime.utils.errors import DataError
from slime.utils.types import RolloutBatch

logger = logging.getLogger(__name__)


def dump_train_data(args: Namespace, rollout_id: int, rollout_data: RolloutBatch) -> None:
    """Write what the rollout was trained on.  Collective over all ranks; the first one writes."""
    group = get_gloo_group()
    shards: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank() == 0 else None
    dist.gather_object(_shard_of_this_rank(rollout_data), shards, dst=0, group=group)
    if shards is not None:
        known = sorted((shard for shard in shards if shard is not None), key=lambda shard: shard["dp_rank"])
        try:
            path = save_train_dump(args.save_debug_train_data, rollout_id, 0, known)
            logger.info("Train data of rollout %d: %s", rollout_id, path)
        except DataError as error:  # training does not depend on a dump
            logger.error("%s The run goes on without this dump.", error)


@torch.no_grad()
def _shard_of_this_rank(rollout_data: RolloutBatch) -> dict[str, Any] | None:
    """This data-parallel rank's samples, from the rank that speaks for it; None from the others."""
    if not mpu.is_pipeline_last_stage(ignore_virtual=True) or mpu.get_tensor_model_parallel_rank() != 0:
        return None
    names = [name for name in sample_columns(rollout_data) if name not in LAYOUT]
    lengths = list(zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True))
    columns: dict[str, list[Any]] = {}
    for name in names:
        values = list(rollout_data[name])
        is_cut = name in TOKEN_COLUMNS or name.endswith(("log_probs", "entropy"))
        if is_cut and mpu.get_context_parallel_world_size() > 1:
            values = [all_gather_with_cp(value, *length) for value, length in zip(values, lengths, strict=True)]
        columns[name] = [value.detach().cpu() if isinstance(value, Tensor) else value for value in values]
    if mpu.get_context_parallel_rank() != 0:
        return None
    samples = [{name: columns[name][index] for name in names} for index in range(len(lengths))]
    layout = {name: rollout_data.get(name) for name in LAYOUT}
    return {
        "dp_rank": mpu.get_data_parallel_rank(),
        **layout,
        "partition": list(rollout_data.get("partition") or range(len(lengths))),
        "raw_reward": rollout_data.get("raw_reward"),
        "samples": samples,
    }
