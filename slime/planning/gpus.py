"""How many GPUs a job takes, and which of them are the engines'."""

from __future__ import annotations

from argparse import Namespace
from typing import NamedTuple


class GpuPlan(NamedTuple):
    """How many GPUs the job takes, and where the engines' part begins."""

    num_gpus: int
    rollout_offset: int


def plan_gpus(args: Namespace) -> GpuPlan:
    """Size of the placement group and the first GPU of the engines, by the mode of the run.

    With A = actor nodes x GPUs per node and R = ``--rollout-num-gpus``:

    =====================================  ============  ===============
    mode, checked in this order            GPUs          rollout offset
    =====================================  ============  ===============
    ``--debug-train-only``                 A             0
    external engines, rollout only         0             0
    external engines                       A             A
    ``--debug-rollout-only``               R             0
    ``--colocate``                         max(A, R)     0
    otherwise (disaggregated)              A + R         A
    =====================================  ============  ===============
    """
    actor_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
    rollout_gpus = args.rollout_num_gpus or 0
    if args.debug_train_only:
        return GpuPlan(actor_gpus, 0)
    if args.rollout_external:
        return GpuPlan(0, 0) if args.debug_rollout_only else GpuPlan(actor_gpus, actor_gpus)
    if args.debug_rollout_only:
        return GpuPlan(rollout_gpus, 0)
    if args.colocate:
        return GpuPlan(max(actor_gpus, rollout_gpus), 0)
    return GpuPlan(actor_gpus + rollout_gpus, actor_gpus)
