"""Memory of a node's host: what the trainer parks there, and the optimizer that lives there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slime.planning.trainer_memory import GIB, RankMemory

TRAINER_PROCESS_BYTES = int(4 * GIB)
"""Resident memory of one trainer process beside what is counted: Python, torch, CUDA's libraries."""
ENGINE_PROCESS_BYTES = int(6 * GIB)
"""The same of one rank of an engine; both are estimates, not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSettings:
    """The flags that decide what is kept on the host."""

    parked_copies: int
    """Sets of weights in pinned memory: the actor's, the reference's, the teacher's, old actors'."""
    is_offloaded: bool
    """The trainer sleeps: what is on the card is copied to the host while it does."""
    saves_in_background: bool = False
    """``--async-save`` writes a copy of what a save holds."""
    trains_critic: bool = False
    """A second trainer of the same shape on the same GPUs."""


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
    """The sleeping trainer's part of the cards, pinned."""
    save: int
    processes: int

    @property
    def total(self) -> int:
        """The sum, at its largest moment."""
        return self.optimizer + self.gradients + self.parked_weights + self.asleep + self.save + self.processes


def pinned_bytes(tensor_bytes: Iterable[int]) -> int:
    """What torch's cache of pinned memory takes for tensors: each is rounded up to a power of two."""
    return sum(1 << max(size - 1, 1).bit_length() for size in tensor_bytes)


def rank_host_memory(
    memory: RankMemory, settings: HostSettings, *, pinned_share: float, engine_ranks: float
) -> HostMemory:
    """What one rank adds to the memory of its node.

    Args:
        memory: of the rank on its card.
        settings: copies and offload.
        pinned_share: pinned bytes for a byte of weights, see :func:`pinned_bytes`.
        engine_ranks: engine processes on the same GPU.
    """
    times = 2 if settings.trains_critic else 1
    state = memory.host_optimizer + memory.optimizer
    return HostMemory(
        optimizer=times * memory.host_optimizer,
        gradients=int(times * memory.host_gradients * pinned_share),
        parked_weights=int(memory.weights * settings.parked_copies * pinned_share),
        asleep=times * memory.static if settings.is_offloaded else 0,
        save=(memory.weights + state) if settings.saves_in_background else 0,
        processes=times * TRAINER_PROCESS_BYTES + int(engine_ranks * ENGINE_PROCESS_BYTES),
    )


def add_hosts(parts: Iterable[HostMemory]) -> HostMemory:
    """The ranks of one node together."""
    items = list(parts)
    return HostMemory(
        *(
            sum(getattr(item, name) for item in items)
            for name in ("optimizer", "gradients", "parked_weights", "asleep", "save", "processes")
        )
    )
