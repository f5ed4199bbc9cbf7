"""The schedule of a rollout: assigns each sample to a rank, an optimizer step and a micro-batch.

Pack first, distribute second: the samples of a step are packed into micro-batches as if there were one rank, the
number of micro-batches is raised to a multiple of the ranks, and whole micro-batches are assigned to ranks.  Every
rank then has the same number of micro-batches in every step, which pipeline and gradient collectives require.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slime.train_data.bins import first_fit, karmarkar_karp, split_until
from slime.train_data.model_dims import ModelDims
from slime.utils.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Parallel sizes of the trainer, and how its micro-batches are packed."""

    dp_size: int
    cp_size: int = 1
    vpp_size: int = 1
    """Virtual pipeline stages per rank; above 1, a rank's micro-batches come in groups."""
    microbatch_group_size_per_vp_stage: int = 1
    use_dynamic_batch_size: bool = False
    """Pack by tokens instead of by a fixed number of samples."""
    max_tokens_per_gpu: int | None = None
    micro_batch_size: int = 1
    balance_data: bool = False
    """Assign micro-batches to ranks by FLOPs instead of round-robin."""
    balance_by_flops: bool = False
    """Balance micro-batches by FLOPs instead of packing first-fit.  The token limit then determines only their number,
    so single micro-batches may exceed it."""
    flops: ModelDims | None = None

    def __post_init__(self) -> None:
        if self.use_dynamic_batch_size and not self.max_tokens_per_gpu:
            raise ConfigError(
                f"--max-tokens-per-gpu is {self.max_tokens_per_gpu} with --use-dynamic-batch-size; it must be a "
                "positive number of tokens, the size that a micro-batch is packed to"
            )
        if not self.use_dynamic_batch_size and self.micro_batch_size < 1:
            raise ConfigError(f"--micro-batch-size is {self.micro_batch_size}; it must be at least 1")
        if (self.balance_data or self.balance_by_flops) and self.flops is None:
            raise ConfigError("--balance-data and --balance-by-flops need the model's dimensions; none were given")

    @property
    def micro_batch_multiple(self) -> int:
        """A step's number of micro-batches, over all ranks, must be a multiple of this."""
        return self.dp_size * (self.microbatch_group_size_per_vp_stage if self.vpp_size > 1 else 1)

    @property
    def capacity_tokens(self) -> int:
        """Maximum tokens of a micro-batch over all context-parallel ranks."""
        assert self.max_tokens_per_gpu is not None
        return self.max_tokens_per_gpu * self.cp_size


class DPSchedule(NamedTuple):
    """Assignment of samples to ranks, steps and micro-batches."""

    partitions: list[list[int]]
    """[rank] positions of its samples in the rollout, in micro-batch order, all steps concatenated."""
    micro_batch_indices: list[list[list[int]]]
    """[rank][micro-batch] positions within ``partitions[rank]``."""
    num_microbatches: list[int]
    """[step] number of micro-batches per rank."""
    global_batch_sizes: list[int]
    """[step] number of executions that the step trains on."""


def build_dp_schedule(
    config: ScheduleConfig,
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[Hashable],
) -> DPSchedule:
    """Return the schedule of one rollout's samples.

    Args:
        config: Parallel sizes and packing.
        total_lengths: Number of tokens of each sample, including the prompt.
        global_batch_size: Executions per optimizer step; an execution with several samples (fan-out) counts once.
        rollout_indices: Execution that each sample belongs to.

    Returns:
        The schedule; executions beyond the last full step are left out.

    Raises:
        DataError: there are too few executions for one step, or too few samples for the ranks.
        ConfigError: the number of fixed-size micro-batches is not divisible among the ranks.
    """
    steps = _samples_by_step(rollout_indices, global_batch_size)
    partitions: list[list[int]] = [[] for _ in range(config.dp_size)]
    micro_batch_indices: list[list[list[int]]] = [[] for _ in range(config.dp_size)]
    num_microbatches: list[int] = []
    for step, positions in enumerate(steps):
        if len(positions) < config.dp_size:
            raise DataError(
                f"step {step} has {len(positions)} samples for {config.dp_size} data-parallel ranks; every rank needs "
                "one; raise --global-batch-size or lower the number of ranks"
            )
        bins = _pack(config, positions, total_lengths)
        for rank, rank_bins in enumerate(_distribute(config, bins, total_lengths)):
            for items in rank_bins:
                start = len(partitions[rank])
                partitions[rank].extend(items)
                micro_batch_indices[rank].append(list(range(start, start + len(items))))
        num_microbatches.append(len(bins) // config.dp_size)
    return DPSchedule(partitions, micro_batch_indices, num_microbatches, [global_batch_size] * len(steps))


def packing_efficiency(
    schedule: DPSchedule, total_lengths: Sequence[int], *, cp_size: int = 1, pad_multiple: int = 1
) -> float:
    """Return the fraction of real tokens among all tokens the trainer computes; 1.0 means no padding.

    Args:
        schedule: The schedule.
        total_lengths: Number of tokens of each sample of the rollout.
        cp_size: Number of context-parallel ranks; above 1, each sequence is padded to a multiple of ``2 * cp_size``.
        pad_multiple: The tokens of a micro-batch on one rank are padded to a multiple of this.
    """
    sequence_multiple = 2 * cp_size if cp_size > 1 else 1
    num_real_tokens = 0
    num_packed_tokens = 0
    for partition, micro_batches in zip(schedule.partitions, schedule.micro_batch_indices, strict=True):
        for indices in micro_batches:
            lengths = [total_lengths[partition[index]] for index in indices]
            num_real_tokens += sum(lengths)
            padded = sum(math.ceil(length / sequence_multiple) * sequence_multiple for length in lengths)
            num_packed_tokens += math.ceil(padded / (cp_size * pad_multiple)) * cp_size * pad_multiple
    return num_real_tokens / num_packed_tokens if num_packed_tokens else 1.0


def capacity_utilisation(schedule: DPSchedule, total_lengths: Sequence[int], *, capacity_tokens: int) -> float:
    """Return the fraction of the micro-batches' token capacity (``--max-tokens-per-gpu``) that real tokens fill."""
    num_real_tokens = sum(total_lengths[position] for partition in schedule.partitions for position in partition)
    num_micro_batches = sum(map(len, schedule.micro_batch_indices))
    return num_real_tokens / (num_micro_batches * capacity_tokens)


def _samples_by_step(rollout_indices: Sequence[Hashable], global_batch_size: int) -> list[list[int]]:
    """Return the positions of each step's samples: executions in first-seen order, ``global_batch_size`` per step."""
    positions_of_rollout: dict[Hashable, list[int]] = {}
    for position, rollout in enumerate(rollout_indices):
        positions_of_rollout.setdefault(rollout, []).append(position)
    rollouts = list(positions_of_rollout.values())
    num_steps = len(rollouts) // global_batch_size
    if num_steps < 1:
        raise DataError(
            f"the rollout has {len(rollouts)} executions and --global-batch-size is {global_batch_size}; one step "
            "needs a full batch; lower --global-batch-size or raise --rollout-batch-size"
        )
    steps: list[list[int]] = []
    for step in range(num_steps):
        of_step = rollouts[step * global_batch_size : (step + 1) * global_batch_size]
        steps.append([position for rollout in of_step for position in rollout])
    return steps


def _pack(config: ScheduleConfig, positions: list[int], total_lengths: Sequence[int]) -> list[list[int]]:
    """Pack one step into micro-batches whose number is a multiple of ``micro_batch_multiple``."""
    multiple = config.micro_batch_multiple
    if not config.use_dynamic_batch_size:
        size = config.micro_batch_size
        bins = [positions[start : start + size] for start in range(0, len(positions), size)]
        if len(bins) % multiple:
            raise ConfigError(
                f"{len(positions)} samples in a step make {len(bins)} micro-batches of --micro-batch-size {size}, "
                f"which is not a multiple of {multiple} (data-parallel ranks times the virtual-pipeline group); "
                "change --micro-batch-size or --global-batch-size, or use --use-dynamic-batch-size"
            )
        return bins

    lengths = [total_lengths[position] for position in positions]
    if config.balance_by_flops:
        assert config.flops is not None
        num_bins = math.ceil(sum(lengths) / config.capacity_tokens)
        if num_bins >= len(positions):
            packed = [[index] for index in range(len(positions))]
        else:
            packed = karmarkar_karp(_forward_flops(config.flops, lengths), num_bins)
    else:
        packed = first_fit(lengths, config.capacity_tokens)
    packed = split_until(packed, lengths, math.ceil(len(packed) / multiple) * multiple)
    return [[positions[index] for index in items] for items in packed]


def _distribute(config: ScheduleConfig, bins: list[list[int]], total_lengths: Sequence[int]) -> list[list[list[int]]]:
    """Return the micro-batches of each rank, the same number for every rank."""
    if not config.balance_data:
        return [bins[rank :: config.dp_size] for rank in range(config.dp_size)]
    assert config.flops is not None
    sizes = iter(_forward_flops(config.flops, [total_lengths[position] for items in bins for position in items]))
    weights = [sum(itertools.islice(sizes, len(items))) for items in bins]
    shares = karmarkar_karp(weights, config.dp_size, equal_size=True)
    return [[bins[index] for index in share] for share in shares]


def _forward_flops(model: ModelDims, lengths: Sequence[int]) -> list[int]:
    """Return the FLOPs of each sequence, computing equal lengths, which are common in large rollouts, only once."""
    of_length = {length: model.forward_flops(length) for length in set(lengths)}
    return [of_length[length] for length in lengths]
