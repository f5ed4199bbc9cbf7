"""The rollout manager's methods that concern only its engines.

The driver imports this module to create the manager's handle; the engine code is imported only in the manager's
process.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import ray

from slime.ray.waiting import Watched, wait_for
from slime.utils.misc import Box

if TYPE_CHECKING:
    from slime.ray.engines.fleet import EngineFleet
    from slime.ray.engines.ray_engine import RayEngine, UpdatableEngines
    from slime.weights.push.participants import ExcludedEngine

EngineChoice = Literal["updatable", "without_weights", "evaluation"]

CONTROL_GROUP = "control"
"""Concurrency group for short calls that must not queue behind a running ``generate``."""
HANDLES_TIMEOUT_S = 120.0
"""Seconds for a list of engines to arrive through the object store."""


@dataclass(frozen=True, slots=True)
class EngineList:
    """A list of engines that the driver passes from the manager to the trainers without unpacking it.

    Unpacking an actor handle imports the actor's class, which the driver does not need.
    """

    num: int
    num_new: int
    """See ``UpdatableEngines.num_new``."""
    boxed: Box
    """A reference to the ``list[RayEngine]``."""

    @classmethod
    def of(cls, described: UpdatableEngines) -> EngineList:
        """Put the engines into Ray's object store."""
        return cls(len(described.engines), described.num_new, Box(ray.put(described.engines)))

    def unpacked(self) -> list[RayEngine]:
        """Return the engines."""
        engines: list[RayEngine] = wait_for(
            self.boxed.inner, what="the handles of the engines", timeout_s=HANDLES_TIMEOUT_S
        )
        return engines


class EngineVerbs(Watched):
    """Base class of the manager; see :class:`EngineFleet` for details of each method."""

    args: Namespace
    engines: EngineFleet

    @ray.method(concurrency_group=CONTROL_GROUP)
    def wait_ready(self) -> None:
        """Wait until every engine serves."""
        self.engines.wait_ready()

    @ray.method(concurrency_group=CONTROL_GROUP)
    def run(self, function: Callable[..., Any], /, *arguments: Any) -> Any:
        """Return ``function(engines, *arguments)``, for what extensions do with the :class:`EngineFleet`."""
        return function(self.engines, *arguments)

    # Weights

    def check_weights(self, action: str) -> list[Any]:
        """Call every engine's weight checker with ``action``: snapshot, reset_tensors or compare."""
        return self.engines.check_weights(action)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def describe_engines(self, which: EngineChoice) -> EngineList:
        """Describe live engines.

        Args:
            which: ``updatable``, the engines of the first model that takes pushes; ``without_weights``, those of them
                that restarted and wait for weights; ``evaluation``, those that evaluate in the background.
        """
        weights = self.engines.weights
        if which == "without_weights":
            return EngineList.of(weights.without_weights())
        return EngineList.of(weights.for_evaluation() if which == "evaluation" else weights.updatable())

    @ray.method(concurrency_group=CONTROL_GROUP)
    def get_updatable_engines_and_lock(self) -> tuple[Any, ...]:
        """Return ``(engines, lock, num_new_engines, gpu_counts, gpu_offsets, parallel_configs)``."""
        described = self.engines.weights.updatable()
        counts = [engine.num_gpus for engine in described.engines]
        offsets = [engine.gpu_offset for engine in described.engines]
        configs = [{"tp_size": count // (self.args.sglang_pp_size or 1)} for count in counts]
        return described.handles, self.engines.lock, described.num_new, counts, offsets, configs

    @ray.method(concurrency_group=CONTROL_GROUP)
    def clear_updatable_num_new_engines(self) -> None:
        """Record that the trainers have connected to the engines described last."""
        self.engines.weights.connected()

    @ray.method(concurrency_group=CONTROL_GROUP)
    def push_started(self) -> EngineList:
        """Record that a push begins; return the engines that take it."""
        return EngineList.of(self.engines.weights.push_started())

    @ray.method(concurrency_group=CONTROL_GROUP)
    def push_done(self, excluded: Sequence[ExcludedEngine] = ()) -> None:
        """Record that the engines described last, except ``excluded``, hold the current weights."""
        self.engines.weights.push_done(excluded)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def push_refused(self, excluded: Sequence[ExcludedEngine]) -> None:
        """Handle the engines that a push excluded as ``--weight-push-failure`` says."""
        self.engines.weights.push_refused(excluded)

    # Memory

    def offload(self) -> None:
        """Make the engines on the trainers' GPUs release their memory."""
        self.engines.offload()

    def onload(self, tags: list[str] | None = None) -> None:
        """Make these engines resume the memory with ``tags``; None means all."""
        self.engines.memory.take_back(tags)

    def onload_weights(self) -> None:
        """Allocate memory for the weights, which a push then fills."""
        self.engines.memory.take_back(["weights"])

    def onload_kv(self) -> None:
        """Allocate memory for the KV cache and CUDA graphs; afterwards engines can generate."""
        self.engines.memory.take_back(["kv_cache", "cuda_graph"])

    # Faults

    def find_dead_engines(self, patience_s: float = 0.0) -> int:
        """Report engines whose process has ended; return how many."""
        return self.engines.find_dead_engines(patience_s)

    def recover_updatable_engines(self) -> None:
        """Report dead engines and wait for those that the next push needs."""
        self.engines.recover()

    def health_monitoring_pause(self) -> None:
        """Pause the health monitors."""
        self.engines.pause_monitors()

    def health_monitoring_resume(self) -> None:
        """Resume the health monitors."""
        self.engines.resume_monitors()
