"""Old path, signature and error of the schedule in ``slime.train_data.schedule``.

For code written against slime; nothing inside the package imports this.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence

from slime.backends.megatron_utils.flags.model_dims import schedule_config
from slime.train_data.schedule import DPSchedule
from slime.train_data.schedule import build_dp_schedule as _build_dp_schedule
from slime.utils.errors import ConfigError, DataError

__all__ = ["build_dp_schedule"]


def build_dp_schedule(
    args: Namespace,
    train_parallel_config: Mapping[str, int],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int],
) -> DPSchedule:
    """Return ``(partitions, micro_batch_indices, num_microbatches, global_batch_sizes)``.

    Raises:
        AssertionError: no schedule exists.
    """
    try:
        return _build_dp_schedule(
            schedule_config(args, train_parallel_config),
            total_lengths,
            global_batch_size=global_batch_size,
            rollout_indices=rollout_indices,
        )
    except (ConfigError, DataError) as error:
        raise AssertionError(str(error)) from error
