"""The exchangeable implementations that make up a job."""

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
    """Evaluations that run in the background while the loop continues."""

    @abstractmethod
    def __init__(self, args: Namespace, manager: Any, actor: RayTrainGroup) -> None: ...

    @abstractmethod
    def begin(self, rollout_id: int) -> None:
        """Start evaluating the trainer's weights after ``rollout_id``.  The trainer must be idle."""

    @abstractmethod
    def raise_if_failed(self) -> None:
        """Raise the error of an evaluation that failed, if one did."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the running evaluation, if any."""


MakeObserver = Callable[[Namespace, Any], "GroupObserver"]
"""Called with the arguments and the data source, in the process of the rollout manager."""


@dataclass(frozen=True)
class Part:
    """A class or function by name; only the process that uses it imports it."""

    path: str
    """``package.module:name``.  With a dot in place of the colon, a failing import in the module would be hidden."""
    options: Mapping[str, Part | str] = field(default_factory=dict)
    """Keyword arguments for its call; values that are parts are loaded with it."""

    def load(self) -> Any:
        """Import and return the class or function, with :attr:`options` bound."""
        loaded = pkgutil.resolve_name(self.path)
        options = {name: one.load() if isinstance(one, Part) else one for name, one in self.options.items()}
        return partial(loaded, **options) if options else loaded


def load_all(parts: Iterable[Part]) -> tuple[Any, ...]:
    """Import several parts."""
    return tuple(part.load() for part in parts)


@dataclass(frozen=True)
class Parts:
    """The implementations that ``slime.compose`` chose for a job; the defaults are the core's."""

    sinks: tuple[Part, ...] = ()
    """Subclasses of ``telemetry.Sink``: receive every process's telemetry, in addition to ``metrics.jsonl``."""
    transforms: tuple[Part, ...] = ()
    """Subclasses of ``ModelTransform``: changes of the actor's model after it is built."""
    critic_transforms: tuple[Part, ...] = ()
    """The same for the critic's model."""
    guides: tuple[Part, ...] = ()
    """Subclasses of ``Guide``: training targets of the actor besides the rewards and the reference model."""
    evaluation: Part | None = None
    """A subclass of :class:`Evaluation`; None if the loop waits for evaluations."""
    observers: tuple[Part, ...] = ()
    """Observers of the prompt groups, each a :data:`MakeObserver`."""
    outputs: Mapping[str, str | Path] = field(default_factory=dict)
    """Flag -> output path that an extension writes and reads back; see ``slime.ray.save_lock.lock_outputs``."""
    train_group: Part | None = None
    """A subclass of ``RayTrainGroup``; None for ``RayTrainGroup`` itself."""
    servers: Part | None = None
    """Called with args and GPUs to start or adopt routers and engines; None if the core starts them."""
    transport: Part | None = None
    """A ``MakeTransport`` for pushing the actor's weights to the engines; None for the plain push."""


CORE = Parts()
