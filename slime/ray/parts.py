"""The implementations that a job is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.observability.telemetry import Sink

if TYPE_CHECKING:
    from slime.backends.megatron_utils.model_transform import ModelTransform


@dataclass(frozen=True)
class Parts:
    """What ``slime.compose`` chose for a job; the defaults are the core's own.

    Every value is a class or a function of a module, or a tuple of them, so that Ray pickles them by reference.
    """

    sinks: tuple[type[Sink], ...] = ()
    """Take the telemetry of every process beside the metrics' own sinks."""
    transforms: tuple[type[ModelTransform], ...] = ()
    """Changes of the actor's model after it is built."""


CORE = Parts()
