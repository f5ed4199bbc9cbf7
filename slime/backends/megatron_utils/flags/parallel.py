"""Parallel layout that the trainer's complete flags describe.  Does not import Megatron."""

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

    @property
    def tower_copies(self) -> int:
        """Times that a vision tower's FLOPs are done or waited for: other stages wait for it on the first, and each
        tensor-parallel rank computes it whole, but for sequence parallelism.
        """
        return self.pipeline * (1 if self.sequence_parallel else self.tensor)

    @classmethod
    def from_args(cls, args: Namespace) -> ParallelSizes:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSplit:
    """The split of the layers over pipeline stages by the flags, by megatron-core's rules."""

    num_layers: int
    stages: int = 1
    virtual: int = 1
    first: int | None = None
    """Layers of the first stage; None for as many as the others."""
    last: int | None = None
    embedding_counts: bool = False
    """The embedding takes the place of a layer in the first stage."""
    loss_counts: bool = False
    layout: str | None = None
    """A custom layout, such as ``Et*3|(tt|)*2L``."""

    @classmethod
    def from_args(cls, args: Namespace) -> PipelineSplit:
        return cls(
            num_layers=args.num_layers,
            stages=args.pipeline_model_parallel_size,
            virtual=args.virtual_pipeline_model_parallel_size or 1,
            first=args.decoder_first_pipeline_num_layers,
            last=args.decoder_last_pipeline_num_layers,
            embedding_counts=bool(args.account_for_embedding_in_pipeline_split),
            loss_counts=bool(args.account_for_loss_in_pipeline_split),
            layout=args.pipeline_model_parallel_layout,
        )
