"""The schedule's config from the flags."""

from __future__ import annotations

from argparse import Namespace

from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.flags.data import batch_config
from slime.train_data.schedule import ScheduleConfig


def schedule_config(
    args: Namespace, *, dp_size: int, cp_size: int, vpp_size: int, microbatch_group_size_per_vp_stage: int
) -> ScheduleConfig:
    """Return the packing of the flags over a trainer of these sizes."""
    batch = batch_config(args)
    is_balanced = batch.balance_data or batch.balance_by_flops
    return ScheduleConfig(
        dp_size=dp_size,
        cp_size=cp_size,
        vpp_size=vpp_size,
        microbatch_group_size_per_vp_stage=microbatch_group_size_per_vp_stage,
        use_dynamic_batch_size=batch.use_dynamic_batch_size,
        max_tokens_per_gpu=batch.max_tokens_per_gpu,
        micro_batch_size=batch.micro_batch_size,
        balance_data=batch.balance_data,
        balance_by_flops=batch.balance_by_flops,
        flops=model_dims(args) if is_balanced else None,
    )
