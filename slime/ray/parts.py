"""The implementations that a job is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.backends.megatron_utils.model_transform import ModelTransform
    from slime.backends.megatron_utils.update_weight.transport import MakeTransport
    from slime.observability.telemetry import Sink
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
class Parts:
    """What ``slime.compose`` chose for a job; the defaults are the core's own.

    Every class and function is one of a module, so that Ray pickles it by reference.
    """

    sinks: tuple[type[Sink], ...] = ()
    """Take the telemetry of every process beside the metrics' own sinks."""
    transforms: tuple[type[ModelTransform], ...] = ()
    """Changes of the actor's model after it is built."""
    evaluation: type[Evaluation] | None = None
    """Evaluates beside training; None when the loop waits for evaluations."""
    observers: tuple[MakeObserver, ...] = ()
    """Observers of the prompt groups."""
    outputs: Mapping[str, str | Path] = field(default_factory=dict)
    """What extensions write and read back, by the flags that name it; see ``slime.ray.save_lock.lock_outputs``."""
    train_group: Callable[..., RayTrainGroup] | None = None
    """Makes the ranks of a trainer; None for the plain ``RayTrainGroup``."""
    transport: MakeTransport | None = None
    """Makes the way of the actor's weights to the engines; None for the plain push."""


CORE = Parts()
