"""How ranks are numbered: coordinates in the parallel groups, nodes and GPUs."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSizes:
    """Sizes of the trainer's groups.  Invariant: they divide ``world`` (checked when the flags are)."""

    world: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual: int = 1
    """Virtual pipeline stages of one rank."""
    sequence_parallel: bool = False

    @property
    def data(self) -> int:
        """Ranks that see different samples."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return self.world // (self.expert_tensor * self.expert * self.pipeline)

    @classmethod
    def from_args(cls, args: Namespace) -> ParallelSizes:
        """From complete flags."""
        return cls(
            world=args.world_size,
            tensor=args.tensor_model_parallel_size,
            pipeline=args.pipeline_model_parallel_size,
            context=args.context_parallel_size,
            expert=args.expert_model_parallel_size,
            expert_tensor=args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
            virtual=args.virtual_pipeline_model_parallel_size or 1,
            sequence_parallel=bool(args.sequence_parallel),
        )


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One trainer rank: where it runs, and which part of the work it has."""

    rank: int
    node: int
    gpu: int
    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    expert_tensor: int
    expert_data: int


def rank_places(sizes: ParallelSizes, gpus_per_node: int) -> list[RankPlace]:
    """Every rank, in order.

    Ranks are dealt out to tensor, context, data and pipeline groups, the first varying fastest; for experts to
    expert-tensor, expert, expert-data and pipeline groups (megatron-core's order ``tp-cp-ep-dp-pp``).  Rank r runs on
    the r-th GPU of the job, nodes in order of their addresses.
    """
    places = []
    for rank in range(sizes.world):
        tensor, context, data, pipeline = _digits(rank, (sizes.tensor, sizes.context, sizes.data))
        expert_tensor, expert, expert_data, _ = _digits(rank, (sizes.expert_tensor, sizes.expert, sizes.expert_data))
        places.append(
            RankPlace(
                rank=rank, node=rank // gpus_per_node, gpu=rank % gpus_per_node,
                tensor=tensor, context=context, data=data, pipeline=pipeline,
                expert=expert, expert_tensor=expert_tensor, expert_data=expert_data,
            )
        )  # fmt: skip
    return places


def _digits(number: int, radices: tuple[int, ...]) -> tuple[int, ...]:
    """``number`` in mixed radix, the lowest digit first; the last has what is left."""
    digits = []
    for radix in radices:
        number, digit = divmod(number, radix)
        digits.append(digit)
    return (*digits, number)
