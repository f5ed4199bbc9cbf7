"""Work and traffic of one step, as far as arithmetic goes: micro-batches, FLOPs, the bubble of a pipeline, pushes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from slime.train_data.model_dims import ModelDims
from slime.train_data.schedule import DPSchedule, ScheduleConfig, build_dp_schedule


@dataclass(frozen=True, slots=True)
class StepWork:
    """One rollout's training, over all optimizer steps."""

    num_samples: int
    num_tokens: int
    longest: int
    num_microbatches: tuple[int, ...]
    """Of each rank, by optimizer step."""
    forward_passes: int
    """Without gradients: reference, old policy, teacher."""
    model_flops: int
    """Forward and backward, nothing counted twice."""
    hardware_flops: int
    """With the passes without gradients, and what is recomputed."""
    bubble: float
    """Part of a pipeline rank's time in which it waits, were all micro-batches alike."""
    imbalance: float
    """Work of the rank with the most, over the mean."""
    tower_flops: int = 0
    """Those of ``hardware_flops`` that the vision tower on the first stage takes."""


def reference_lengths(num_samples: int, longest: int) -> list[int]:
    """Return the lengths of the reference distribution, log-normal with a long tail, cut to ``longest`` tokens."""
    generator = random.Random(0)
    return [min(longest, int(generator.lognormvariate(7.5, 1.0)) + 10) for _ in range(num_samples)]


def step_work(
    lengths: Sequence[int],
    *,
    schedule: ScheduleConfig,
    flops: ModelDims,
    global_batch_size: int,
    pipeline: int,
    forward_passes: int,
    recomputes_everything: bool,
    images: Sequence[int] = (),
) -> StepWork:
    """Return the work that the trainer's own scheduler makes of samples of these lengths.

    Args:
        lengths: tokens of each sample, prompt included.
        global_batch_size: rollouts of an optimizer step.
        forward_passes: over all samples, without gradients.
        recomputes_everything: full recompute makes a third forward pass of every layer.
        images: patches of each image of a sample, the same for all.
    """
    one_each = range(len(lengths))
    plan = build_dp_schedule(schedule, lengths, global_batch_size=global_batch_size, rollout_indices=one_each)
    per_rank = [sum(flops.forward_flops(lengths[i]) for i in partition) for partition in plan.partitions]
    forward, tower = sum(per_rank), len(lengths) * flops.tower_flops(images)
    tower_work = int(flops.train_flops(0, tower)) + forward_passes * tower
    return StepWork(
        num_samples=len(lengths),
        num_tokens=sum(lengths),
        longest=max(lengths),
        num_microbatches=tuple(plan.num_microbatches),
        forward_passes=forward_passes,
        model_flops=int(flops.train_flops(forward, tower)),
        hardware_flops=forward * (3 + recomputes_everything + forward_passes) + tower_work,
        bubble=_bubble(plan, pipeline, schedule.vpp_size),
        imbalance=max(per_rank) * len(per_rank) / forward,
        tower_flops=tower_work,
    )


def _bubble(plan: DPSchedule, pipeline: int, virtual: int) -> float:
    """Return (p - 1) / (v m + p - 1), the steps weighed by their micro-batches."""
    work = sum(virtual * count for count in plan.num_microbatches)
    waits = (pipeline - 1) * len(plan.num_microbatches)
    return waits / (work + waits)


@dataclass(frozen=True, slots=True)
class PushTraffic:
    """Bytes of one weight push."""

    bytes_per_engine: int
    """Every engine gets the whole model once, in its own format."""
    bytes_per_trainer_rank: int
    """Bytes that a rank puts into buckets (colocated), or that the largest stage's source broadcasts."""
    num_buckets: int
    """Of a rank, one after the other."""
    way: str
    all_engines_bytes: int
