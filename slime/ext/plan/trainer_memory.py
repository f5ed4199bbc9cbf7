"""Memory of the trainer: of one rank's GPU, asleep and in a step, and of a node's host."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from slime.backends.megatron_utils.flags.parallel import ParallelSizes
from slime.ext.plan.activations import (
    Kept,
    MicroBatch,
    Recompute,
    backward_work,
    chunk_activations,
    head_activations,
    tower_activations,
)
from slime.ext.plan.layout import StageChunk, rank_places
from slime.ext.plan.parameters import ParameterCount
from slime.ext.plan.run_flags import RunFlags
from slime.train_data.model_dims import ModelDims

GIB = 2**30
FROZEN_BYTES = {"fp8": 1 + 4 / 128**2, "int4": 0.5 + 2 / 128}
"""Of an element, its part of a scale included (``--lora-base-precision``)."""
CONTEXT_BYTES = int(0.5 * GIB)
"""CUDA's context and loaded kernels of one process (measured, benchmarks/results)."""
FIRST_COMMUNICATOR_BYTES = int(0.78 * GIB)
COMMUNICATOR_BYTES = int(0.5 * GIB)
"""NCCL's buffers of the first process group of a rank, and of each further one that is used (measured)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """The flags that decide the trainer's memory beside shape and layout."""

    batch: MicroBatch
    recompute: Recompute = Recompute()
    weight_bytes: int = 2
    matrix_bytes: float = 2
    """Of the frozen matrices under adapters."""
    gradient_bytes: int = 4
    """4 where gradients are summed in fp32, else the weights'."""
    has_master_weights: bool = True
    """Weights of less than fp32 have a copy in fp32 beside Adam's two moments."""
    moments_bytes: int = 8
    """Of Adam's two moments of one element."""
    offloaded_fraction: float = 0.0
    """Part of the optimizer that lives on the host (``--optimizer-cpu-offload``)."""
    has_optimizer: bool = True
    """False with ``--num-rollout 0``."""
    num_microbatches: int = 1
    """Of a step and rank: bounds the micro-batches in flight in a pipeline."""
    vp_group: int = 1
    """Micro-batches that follow each other through a virtual stage."""
    mtp_chunk: int = -1

    @classmethod
    def from_args(
        cls, args: Namespace, sizes: ParallelSizes, *, tokens: int, num_microbatches: int, patches: int = 0
    ) -> TrainerSettings:
        """Read the settings from complete flags."""
        element = 4 if args.fp32 else 2
        return cls(
            batch=MicroBatch(tokens=tokens, element_bytes=element, patches=patches),
            recompute=Recompute(
                granularity=args.recompute_granularity,
                method=args.recompute_method,
                num_layers=args.recompute_num_layers or 1,
                modules=tuple(args.recompute_modules or ("core_attn",)),
            ),
            weight_bytes=element,
            matrix_bytes=FROZEN_BYTES.get(str(vars(args).get("lora_base_precision")), element),
            gradient_bytes=4 if args.accumulate_allreduce_grads_in_fp32 or args.fp32 else 2,
            has_master_weights=not args.fp32,
            moments_bytes=args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize,
            offloaded_fraction=args.optimizer_offload_fraction if args.optimizer_cpu_offload else 0.0,
            has_optimizer=args.num_rollout != 0,
            num_microbatches=num_microbatches,
            vp_group=args.microbatch_group_size_per_vp_stage or sizes.pipeline,
            mtp_chunk=args.log_probs_chunk_size,
        )

    @property
    def optimizer_bytes(self) -> int:
        """Of one element: two moments, and the master weight."""
        return self.moments_bytes + (4 if self.has_master_weights else 0)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on the GPU of one rank, and what of its state lies on the host."""

    weights: int
    frozen: int
    """Those among the weights that adapters leave as they are; 0 without adapters."""
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
    copied: int
    """Copied by --trainer-recovery memory: master weights, moments, weights that are not trained."""
    details: dict[str, int] = field(default_factory=dict)

    @property
    def static(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """Bytes that torch has allocated at the peak of a training step."""
        return self.static + self.activations + max(self.head, self.work)

    @property
    def outside(self) -> int:
        """Bytes outside of torch's allocator: CUDA's context, NCCL."""
        return CONTEXT_BYTES + self.communicators


def shard(count: int, parts: int) -> int:
    """Return the elements of a buffer on one of ``parts`` ranks."""
    return -(-count // parts)


def rank_memory(
    chunks: Sequence[StageChunk],
    stage: int,
    count: ParameterCount,
    dims: ModelDims,
    sizes: ParallelSizes,
    settings: TrainerSettings,
) -> RankMemory:
    """Return the memory of a rank of one pipeline stage."""
    owned = shard(count.dense, sizes.data * sizes.context) + shard(count.expert, sizes.expert_data)
    optimizer = owned * settings.optimizer_bytes if settings.has_optimizer else 0
    offloaded = int(optimizer * settings.offloaded_fraction)
    step_gradients = 0 if settings.gradient_bytes == 4 else 4 * owned
    batch, recompute = settings.batch, settings.recompute
    layers = tuple(layer for chunk in chunks for layer in chunk.layers)
    kept = [chunk_activations(chunk.layers, dims, sizes, batch, recompute) for chunk in chunks]
    in_flight = micro_batches_in_flight(stage, sizes, settings)
    activations = sum(item.kept for item in kept) * in_flight // len(kept)
    seen = Kept(0, 0)
    if any(chunk.has_embedding for chunk in chunks):
        seen = tower_activations(dims, batch)
        activations += seen.kept * -(-in_flight // len(kept))
    head: dict[str, int] = {}
    if any(chunk.has_head for chunk in chunks):
        head = head_activations(dims, sizes, batch, mtp_chunk=settings.mtp_chunk, recompute=recompute)
    frozen = (count.frozen - count.frozen_matrices) * settings.weight_bytes + 4 * count.buffers_fp32
    frozen += int(count.frozen_matrices * settings.matrix_bytes)
    work = max(max(item.again for item in kept) + backward_work(dims, sizes, batch, layers), seen.again)
    return RankMemory(
        weights=count.trained * settings.weight_bytes + frozen,
        frozen=frozen if count.frozen_matrices else 0,
        gradients=count.trained * settings.gradient_bytes if settings.has_optimizer else 0,
        optimizer=optimizer - offloaded + int(step_gradients * (1 - settings.offloaded_fraction)),
        activations=activations,
        head=sum(head.values()),
        work=work,
        communicators=communicator_bytes(sizes, has_experts=count.expert > 0),
        host_optimizer=offloaded,
        host_gradients=int(4 * owned * settings.offloaded_fraction),
        copied=owned * (settings.moments_bytes + 4) + (0 if count.frozen_matrices else frozen),
        details=head,
    )


def micro_batches_in_flight(stage: int, sizes: ParallelSizes, settings: TrainerSettings) -> int:
    """Count the chunks of activations that are alive at once: forward passes ahead of their backward passes.

    Without virtual stages stage s of p runs p - s micro-batches ahead.  With v of them it runs through
    ``2 (p - s - 1) + (v - 1) group + 1`` chunks before its first backward pass.
    """
    ahead = sizes.pipeline - stage
    if sizes.virtual > 1:
        ahead = 2 * (sizes.pipeline - stage - 1) + (sizes.virtual - 1) * settings.vp_group + 1
    return min(ahead, settings.num_microbatches * sizes.virtual)


def communicator_bytes(sizes: ParallelSizes, *, has_experts: bool) -> int:
    """Return the bytes of NCCL's buffers: a communicator for each kind of group in use, and the one of all ranks."""
    used = [sizes.tensor > 1, sizes.pipeline > 1, sizes.context > 1, sizes.data * sizes.context > 1]
    if has_experts:
        used += [sizes.expert > 1, sizes.expert_tensor > 1, sizes.expert_data > 1]
    return FIRST_COMMUNICATOR_BYTES + sum(used) * COMMUNICATOR_BYTES


TRAINER_PROCESS_BYTES = int(4 * GIB)
"""Resident memory of one trainer process beside what is counted: Python, torch, CUDA's libraries."""
ENGINE_PROCESS_BYTES = int(6 * GIB)
"""The same of one rank of an engine; both are estimates, not measured."""
PINNED_SHARE = 1.15
"""Pinned bytes for a byte of gradients: torch rounds every tensor up to a power of two."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of one node."""

    optimizer: int
    """Master weights and moments of CPU Adam, pageable."""
    gradients: int
    """The gradients that CPU Adam steps with, pinned."""
    parked_weights: int
    """Pinned."""
    asleep: int
    """What a sleeping trainer holds beside gradients and parked weights; pinned, also while it is awake."""
    save: int
    copies: int
    """Of the ranks' state, for --trainer-recovery memory: each rank's own, pinned, and those in the keepers."""
    processes: int

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))


def rank_host_memory(
    memory: RankMemory,
    *,
    parked_copies: int,
    is_offloaded: bool,
    saves_in_background: bool,
    state_copies: int,
    trains_critic: bool,
    has_engine: bool,
) -> HostMemory:
    """Return the memory that one rank adds to its node.

    Args:
        parked_copies: sets of weights in pinned memory: the actor's, the reference's, the teacher's, old actors'; what
            adapters leave as it is counts once, where the trainer sleeps.
        is_offloaded: the trainer sleeps; optimizers, and a critic's weights, are copied to the host while it does.
        saves_in_background: ``--async-save`` writes a copy of what a save holds.
        trains_critic: a second trainer of the same shape on the same GPUs.
    """
    times = 2 if trains_critic else 1
    state = memory.host_optimizer + memory.optimizer
    own = memory.weights - memory.frozen
    return HostMemory(
        optimizer=times * memory.host_optimizer,
        gradients=int(times * memory.host_gradients * PINNED_SHARE),
        parked_weights=own * parked_copies + memory.frozen * is_offloaded,
        asleep=times * memory.optimizer + trains_critic * memory.weights if is_offloaded else 0,
        save=(own + state) if saves_in_background else 0,
        copies=times * state_copies * memory.copied,
        processes=times * TRAINER_PROCESS_BYTES + has_engine * ENGINE_PROCESS_BYTES,
    )


def state_copies(run: RunFlags, sizes: ParallelSizes) -> int:
    """Count the copies of its state that a rank adds to the nodes' memory (``--trainer-recovery memory``).

    Its own, and two in each keeper: that on its node, and on another one where there is one.
    """
    if run.state_copy_interval is None:
        return 0
    nodes = {place.node for place in rank_places(sizes, run.num_gpus_per_node)}
    return 1 + 2 * min(2, len(nodes))


def add_hosts(parts: Iterable[HostMemory]) -> HostMemory:
    """Add up the ranks of one node."""
    items = list(parts)
    return HostMemory(*(sum(getattr(item, part.name) for item in items) for part in fields(HostMemory)))


TRAINER_ASLEEP_BYTES = int(0.8 * GIB)
GROUPS_ASLEEP_BYTES = int(1.3 * GIB)
"""Memory of a sleeping trainer on the card, and the addition with more than one rank (measured)."""
ENGINE_GROUPS_BYTES = int(1.4 * GIB)
"""Additional memory of a released engine that spans several GPUs (measured with two)."""


def trainer_bytes_beside_engine(run: RunFlags, sizes: ParallelSizes) -> int:
    """Return the bytes that an idle trainer keeps on an engine's card."""
    if not run.colocate or run.debug_rollout_only:
        return 0
    return TRAINER_ASLEEP_BYTES + (GROUPS_ASLEEP_BYTES if sizes.world > 1 else 0) + run.push_buffer_bytes
