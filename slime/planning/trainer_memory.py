"""Memory of one trainer rank: what lies there all the time, and what a training step adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slime.planning.activations import (
    MicroBatch,
    Recompute,
    backward_work,
    chunk_activations,
    head_activations,
)
from slime.planning.parallel import ParallelSizes
from slime.planning.parameters import ParameterCount
from slime.planning.stages import StageChunk
from slime.train_data.model_dims import ModelDims

GIB = 2**30
CONTEXT_BYTES = int(0.5 * GIB)
"""CUDA's context and loaded kernels of one process (measured, docs/results.md)."""
FIRST_COMMUNICATOR_BYTES = int(0.78 * GIB)
COMMUNICATOR_BYTES = int(0.5 * GIB)
"""NCCL's buffers of the first process group of a rank, and of each further one that is used (measured)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """The flags that decide the trainer's memory beside shape and layout."""

    batch: MicroBatch
    recompute: Recompute = Recompute()
    weight_bytes: int = 2
    gradient_bytes: int = 4
    """4 where gradients are summed in fp32, else the weights'."""
    has_master_weights: bool = True
    """Weights of less than fp32 have a copy in fp32 beside Adam's two moments."""
    offloaded_fraction: float = 0.0
    """Part of the optimizer that lives on the host (``--optimizer-cpu-offload``)."""
    has_optimizer: bool = True
    """False with ``--num-rollout 0``."""
    num_microbatches: int = 1
    """Of a step and rank: bounds the micro-batches in flight in a pipeline."""
    vp_group: int = 1
    """Micro-batches that follow each other through a virtual stage."""
    mtp_chunk: int = -1

    @property
    def optimizer_bytes(self) -> int:
        """Of one element: two moments, and the master weight."""
        return 12 if self.has_master_weights else 8


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on the GPU of one rank, and what of its state lies on the host."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Kept for the backward pass, over all micro-batches in flight."""
    head: int
    """Logits and what goes with them; 0 but on the last stage."""
    work: int
    """Recomputed layers and gradients at the peak, where that is not the head's moment."""
    communicators: int
    host_optimizer: int
    """Master weights and moments on the host."""
    host_gradients: int
    details: dict[str, int] = field(default_factory=dict)

    @property
    def static(self) -> int:
        """Weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """What torch has allocated at the peak of a training step."""
        return self.static + self.activations + max(self.head, self.work)

    @property
    def outside(self) -> int:
        """What torch does not know of: CUDA's context, NCCL."""
        return CONTEXT_BYTES + self.communicators


def shard(count: int, parts: int) -> int:
    """Elements of a buffer on one of ``parts`` ranks."""
    return -(-count // parts)


def rank_memory(
    chunks: Sequence[StageChunk],
    stage: int,
    count: ParameterCount,
    shape: ModelDims,
    sizes: ParallelSizes,
    settings: TrainerSettings,
) -> RankMemory:
    """Memory of a rank of one pipeline stage.

    Args:
        chunks: layers of the stage.
        stage: its number.
        count: parameters of the rank.
        shape: of the model.
        sizes: of the groups.
        settings: batch, recompute, precision, offload.
    """
    owned = shard(count.dense, sizes.data * sizes.context) + shard(count.expert, sizes.expert_data)
    optimizer = owned * settings.optimizer_bytes if settings.has_optimizer else 0
    offloaded = int(optimizer * settings.offloaded_fraction)
    step_gradients = 0 if settings.gradient_bytes == 4 else 4 * owned
    batch, recompute = settings.batch, settings.recompute
    layers = tuple(layer for chunk in chunks for layer in chunk.layers)
    kept = [chunk_activations(chunk.layers, shape, sizes, batch, recompute) for chunk in chunks]
    in_flight = micro_batches_in_flight(stage, sizes, settings)
    activations = sum(item.kept for item in kept) * in_flight // len(kept)
    head: dict[str, int] = {}
    if any(chunk.has_head for chunk in chunks):
        head = head_activations(shape, sizes, batch, mtp_chunk=settings.mtp_chunk, recompute=recompute)
    work = max(item.again for item in kept) + backward_work(shape, sizes, batch, layers)
    return RankMemory(
        weights=count.total * settings.weight_bytes + 4 * count.buffers_fp32,
        gradients=count.trained * settings.gradient_bytes if settings.has_optimizer else 0,
        optimizer=optimizer - offloaded + int(step_gradients * (1 - settings.offloaded_fraction)),
        activations=activations,
        head=sum(head.values()),
        work=work,
        communicators=communicator_bytes(sizes, has_experts=count.expert > 0),
        host_optimizer=offloaded,
        host_gradients=int(4 * owned * settings.offloaded_fraction),
        details=head,
    )


def micro_batches_in_flight(stage: int, sizes: ParallelSizes, settings: TrainerSettings) -> int:
    """Chunks of activations that are alive at once: forward passes that run ahead of their backward passes.

    Without virtual stages stage s of p runs p - s micro-batches ahead.  With v of them it runs through
    ``2 (p - s - 1) + (v - 1) group + 1`` chunks before its first backward pass.
    """
    ahead = sizes.pipeline - stage
    if sizes.virtual > 1:
        ahead = 2 * (sizes.pipeline - stage - 1) + (sizes.virtual - 1) * settings.vp_group + 1
    return min(ahead, settings.num_microbatches * sizes.virtual)


def communicator_bytes(sizes: ParallelSizes, *, has_experts: bool) -> int:
    """NCCL's buffers: one communicator for each kind of group in use, and the one of all ranks."""
    used = [sizes.tensor > 1, sizes.pipeline > 1, sizes.context > 1, sizes.data * sizes.context > 1]
    if has_experts:
        used += [sizes.expert > 1, sizes.expert_tensor > 1, sizes.expert_data > 1]
    return FIRST_COMMUNICATOR_BYTES + sum(used) * COMMUNICATOR_BYTES
