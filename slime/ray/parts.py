"""The implementations that a job is made of."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.ray.actor_group import RayTrainGroup
    from slime.rollout.run_state import GroupObserver


class Evaluation(ABC):
    """Evaluations for which the loop does not wait."""

    @abstractmethod
    def __init__(self, args: Namespace, manager: Any, actor: RayTrainGroup) -> None: ...

    @abstractmethod
    def begin(self, rollout_id: int) -> None:
        """Begin to evaluate the weights that the trainer has after ``rollout_id``; the trainer must be idle."""

    @abstractmethod
    def raise_if_failed(self) -> None:
        """Raise the error of an evaluation that has ended with one."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the evaluation that runs, if one does."""


MakeObserver = Callable[[Namespace, Any], "GroupObserver"]
"""Called with the arguments and the data source, in the process of the rollout manager."""


@dataclass(frozen=True)
class Part:
    """A class or function by its name: the process that uses it imports it, and no other process does."""

    path: str
    """``package.module:name``.  With a dot for the colon an import that fails in the module would be hidden."""
    options: Mapping[str, Part | str] = field(default_factory=dict)
    """Keywords of its call; parts among them are imported with it."""

    def load(self) -> Any:
        """Import it."""
        loaded = pkgutil.resolve_name(self.path)
        options = {name: one.load() if isinstance(one, Part) else one for name, one in self.options.items()}
        return partial(loaded, **options) if options else loaded


def load_all(parts: Iterable[Part]) -> tuple[Any, ...]:
    """Import several parts."""
    return tuple(part.load() for part in parts)


@dataclass(frozen=True)
class Parts:
    """What ``slime.compose`` chose for a job; the defaults are the core's own."""

    sinks: tuple[Part, ...] = ()
    """Subclasses of ``telemetry.Sink``, which take the telemetry of every process beside ``metrics.jsonl``."""
    transforms: tuple[Part, ...] = ()
    """Subclasses of ``ModelTransform``: changes of the actor's model after it is built."""
    critic_transforms: tuple[Part, ...] = ()
    """The critic's."""
    guides: tuple[Part, ...] = ()
    """Subclasses of ``Guide``: what the actor is trained towards beside the rewards and the reference."""
    evaluation: Part | None = None
    """A subclass of :class:`Evaluation`; None when the loop waits for evaluations."""
    observers: tuple[Part, ...] = ()
    """Each a :data:`MakeObserver`, for the prompt groups."""
    outputs: Mapping[str, str | Path] = field(default_factory=dict)
    """What extensions write and read back, by the flags that name it; see ``slime.ray.save_lock.lock_outputs``."""
    train_group: Part | None = None
    """Makes the ranks of a trainer; None for the plain ``RayTrainGroup``."""
    servers: Part | None = None
    """Starts or adopts the models' routers and engines, given args and GPUs; None for those that the core starts."""
    transport: Part | None = None
    """A ``MakeTransport``, of the way of the actor's weights to the engines; None for the plain push."""


CORE = Parts()
