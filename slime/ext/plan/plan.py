"""The results of a plan, one tree of frozen dataclasses, and the cards that a run can be planned for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slime.backends.megatron_utils.flags.parallel import ParallelSizes
from slime.ext.plan.engines import EngineGpus, EngineMemory, EngineShape
from slime.ext.plan.layout import RankPlace
from slime.ext.plan.parameters import ParameterCount
from slime.ext.plan.traffic import PushTraffic, StepWork
from slime.ext.plan.trainer_memory import GIB, HostMemory, RankMemory
from slime.utils.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU, and the host it usually comes in."""

    name: str
    memory: int
    """Bytes that CUDA reports."""
    bf16_flops: float
    """Dense, without sparsity."""
    host_memory: int
    """Of a node of eight, as it is usually sold."""
    bandwidth: float
    """Of its memory, bytes a second."""


CARDS = {
    card.name: card
    for card in (
        Card("H100", int(79.1 * GIB), 989e12, 2048 * GIB, 3.35e12),
        Card("H200", int(139.8 * GIB), 989e12, 2048 * GIB, 4.8e12),
        Card("H800", int(79.1 * GIB), 989e12, 2048 * GIB, 3.35e12),
        Card("H20", int(95.0 * GIB), 148e12, 2048 * GIB, 4.0e12),
        Card("A100", int(79.1 * GIB), 312e12, 1024 * GIB, 2.0e12),
        Card("B200", int(178.0 * GIB), 2250e12, 2048 * GIB, 8.0e12),
    )
}


def find_card(name: str) -> Card:
    """Return the card called ``name``."""
    if name.upper() not in CARDS:
        raise ConfigError(f"--gpu is {name!r}; known cards are {', '.join(CARDS)}.")
    return CARDS[name.upper()]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Settings of a plan that are no flags of a run."""

    card: Card
    mfu: float = 0.35
    """Of the trainer's forward and backward passes, for the time of a step; above 0, at most 1."""
    lengths: tuple[int, ...] | None = None
    """Tokens of each sample of a rollout; None for the reference distribution."""
    prompts: tuple[int, ...] = ()
    """Tokens of prompts of the data, in the order of a rollout; empty where they are not known."""
    images: tuple[tuple[int, int], ...] = ()
    """Height and width in pixels of each image of a sample."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of the job."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One pipeline stage: its layers, and what a rank of it holds."""

    stage: int
    layers: list[str]
    """Of every virtual stage, layers counted from 1."""
    first_layer: int | None
    num_layers: int
    parameters: ParameterCount
    memory: RankMemory
    forward_peak: int
    """Allocated in a pass without gradients."""


@dataclass(frozen=True, slots=True)
class GpuPhases:
    """Bytes used on the fullest card of each kind, by phase; None where a phase has no such card."""

    train: int | None
    log_probs: int | None
    asleep: int | None
    rollout: int | None
    push: int | None


@dataclass(frozen=True, slots=True)
class EngineGroupPlan:
    """Like engines."""

    model: str
    worker_type: str
    num_engines: int
    num_gpus_per_engine: int
    nnodes: int
    shape: EngineShape
    memory: EngineMemory


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is said of a run before it starts."""

    problems: list[str]
    """Rules that the run breaks; it would not start, or not run through."""
    too_large: list[str]
    """Parts that do not fit into a card or a host."""
    notes: list[str]
    model: str
    num_parameters: int
    card: Card
    num_gpus: int
    num_nodes: int
    sizes: ParallelSizes
    ranks: list[RankPlace]
    stages: list[StagePlan]
    engines: list[EngineGpus]
    engine_groups: list[EngineGroupPlan]
    phases: GpuPhases
    host: HostMemory
    work: StepWork | None
    push: PushTraffic | None
    train_seconds: float | None
    micro_batch_tokens: int
