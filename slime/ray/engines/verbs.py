"""The verbs of the rollout manager that concern its engines alone.

The driver reads them to make the manager's handle; what they call is imported in the manager's process.
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
"""Concurrency group of the short calls that must not queue behind a running ``generate``."""
HANDLES_TIMEOUT_S = 120.0
"""For the description of engines to arrive through the object store."""


@dataclass(frozen=True, slots=True)
class EngineList:
    """Engines that take weights, as the driver passes them from the manager to the trainers.

    A process that unpacks the handle of an actor imports the actor's class; the driver has no use for an engine's.
    """

    num: int
    num_new: int
    """As ``UpdatableEngines`` says."""
    boxed: Box
    """A reference to the list of them."""

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
    """Base of the manager; :class:`EngineFleet` says more of each."""

    args: Namespace
    engines: EngineFleet

    @ray.method(concurrency_group=CONTROL_GROUP)
    def wait_ready(self) -> None:
        """Wait until every engine serves."""
        self.engines.wait_ready()

    @ray.method(concurrency_group=CONTROL_GROUP)
    def run(self, function: Callable[..., Any], /, *arguments: Any) -> Any:
        """Call ``function(engines, *arguments)``, of an extension that asks or does something else."""
        return function(self.engines, *arguments)

    # Weights

    def check_weights(self, action: str) -> list[Any]:
        """Ask the weight checker of every engine to snapshot, reset_tensors or compare."""
        return self.engines.check_weights(action)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def describe_engines(self, which: EngineChoice) -> EngineList:
        """Describe live engines.

        Args:
            which: those of the first model that takes pushes, those of them that wait for weights since a restart,
                or those that evaluate in the background.
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
        """Note that the trainers have connected to the engines that were described last."""
        self.engines.weights.connected()

    @ray.method(concurrency_group=CONTROL_GROUP)
    def push_started(self) -> EngineList:
        """Note that a push begins; describe the engines that take it."""
        return EngineList.of(self.engines.weights.push_started())

    @ray.method(concurrency_group=CONTROL_GROUP)
    def push_done(self, excluded: Sequence[ExcludedEngine] = ()) -> None:
        """Note that the engines that were described last hold the present weights, except ``excluded``."""
        self.engines.weights.push_done(excluded)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def push_refused(self, excluded: Sequence[ExcludedEngine]) -> None:
        """Do with the engines that a push has excluded as ``--weight-push-failure`` says."""
        self.engines.weights.push_refused(excluded)

    # Memory

    def offload(self) -> None:
        """Have the engines release their memory."""
        self.engines.offload()

    def onload(self, tags: list[str] | None = None) -> None:
        """Have the engines take their memory back."""
        self.engines.memory.take_back(tags)

    def onload_weights(self) -> None:
        """Make room for the weights, which a push then fills."""
        self.engines.memory.take_back(["weights"])

    def onload_kv(self) -> None:
        """Make room for the KV cache and the CUDA graphs: after this an engine can generate."""
        self.engines.memory.take_back(["kv_cache", "cuda_graph"])

    # Faults

    def find_dead_engines(self, patience_s: float = 0.0) -> int:
        """Report engines whose process has ended; return how many."""
        return self.engines.find_dead_engines(patience_s)

    def recover_updatable_engines(self) -> None:
        """Wait for the engines that the coming push must meet."""
        self.engines.recover()

    def health_monitoring_pause(self) -> None:
        """Have the monitors ask no engine."""
        self.engines.pause_monitors()

    def health_monitoring_resume(self) -> None:
        """Have the monitors watch."""
        self.engines.resume_monitors()
