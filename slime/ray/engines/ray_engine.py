"""An engine represented by its actor handles, as the rollout manager describes it to the trainers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from slime.ray.waiting import wait_for
from slime.weights.push.engine import EngineProxy


@dataclass(frozen=True)
class RayPending:
    """The pending answers of one engine's nodes."""

    refs: list[ray.ObjectRef]
    what: str

    def wait(self, timeout_s: float) -> Any:
        """Wait for all nodes and return the first node's answer.

        Raises:
            ProcessError: the engine died, refused, or did not answer within ``timeout_s`` seconds.
        """
        return wait_for(self.refs, what=self.what, timeout_s=timeout_s)[0]


@dataclass(kw_only=True, eq=False)
class RayEngine(EngineProxy):
    """One engine, called through the actors on its nodes."""

    node_handles: Sequence[Any]
    """Its actors, one per node; the first serves HTTP."""

    @property
    def handle(self) -> Any:
        """The actor on its first node."""
        return self.node_handles[0]

    def start(self, method: str, /, *arguments: Any, **keywords: Any) -> RayPending:
        """Call a method of the first node's actor."""
        ref = getattr(self.handle, method).remote(*arguments, **keywords)
        return RayPending([ref], f"{method} of engine {self.index}")

    def run(self, function: Callable[..., Any], /, *arguments: Any, on_all_nodes: bool = False) -> RayPending:
        """Call the function in the first node's actor, or in the actors of all nodes."""
        handles = self.node_handles if on_all_nodes else [self.handle]
        refs = [handle.run.remote(function, *arguments) for handle in handles]
        return RayPending(refs, f"{function.__name__} of engine {self.index}")


@dataclass(frozen=True)
class UpdatableEngines:
    """The engines that take new weights."""

    engines: list[RayEngine]
    num_new: int
    """Number of engines that the trainers are not connected to; if above zero, they must reconnect.  At least 1 if
    the engines changed in any way."""

    @property
    def handles(self) -> list[Any]:
        """The actors of the engines' first nodes."""
        return [engine.handle for engine in self.engines]
