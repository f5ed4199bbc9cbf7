"""An engine behind the handles of its actors, as the rollout manager describes it to the trainers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from slime.ray.waiting import wait_for
from slime.weights.push.engine import EngineProxy


@dataclass(frozen=True)
class RayPending:
    """The answers of one engine's nodes, which are on their way."""

    refs: list[ray.ObjectRef]
    what: str

    def wait(self, timeout_s: float) -> Any:
        """Return the first node's answer, once all have answered.

        Raises:
            ProcessError: the engine died, refused, or did not answer within ``timeout_s`` seconds.
        """
        return wait_for(self.refs, what=self.what, timeout_s=timeout_s)[0]


@dataclass(kw_only=True, eq=False)
class RayEngine(EngineProxy):
    """One engine, asked through the actors of its nodes."""

    node_handles: Sequence[Any]
    """Its actors, one a node; the first serves HTTP."""

    @property
    def handle(self) -> Any:
        """The actor of its first node."""
        return self.node_handles[0]

    def start(self, method: str, /, *arguments: Any, **keywords: Any) -> RayPending:
        """Call the method on the actor of the first node."""
        ref = getattr(self.handle, method).remote(*arguments, **keywords)
        return RayPending([ref], f"{method} of engine {self.index}")

    def run(self, function: Callable[..., Any], /, *arguments: Any, on_all_nodes: bool = False) -> RayPending:
        """Call the function in the actor of the first node, or in those of all nodes."""
        handles = self.node_handles if on_all_nodes else [self.handle]
        refs = [handle.run.remote(function, *arguments) for handle in handles]
        return RayPending(refs, f"{function.__name__} of engine {self.index}")


@dataclass(frozen=True)
class UpdatableEngines:
    """The engines that take new weights."""

    engines: list[RayEngine]
    num_new: int
    """Engines started since the trainers last connected; above zero they must connect again."""

    @property
    def handles(self) -> list[Any]:
        """The actors of the engines' first nodes."""
        return [engine.handle for engine in self.engines]
