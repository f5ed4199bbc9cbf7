"""Ray handles of engines, as the ``EngineProxy`` that a weight push talks to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from slime.ray.waiting import wait_for
from slime.weights.push.verbs import EngineProxy, Verb


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
    """One engine: each verb becomes a remote call of the engine actor's method of the same name."""

    node_handles: Sequence[Any]
    """Its actors, one a node; the first serves HTTP."""

    @property
    def handle(self) -> Any:
        """The actor of its first node."""
        return self.node_handles[0]

    def start(self, verb: Verb, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> RayPending:
        """Call the method on the actor of the first node, or on those of all nodes."""
        handles = self.node_handles if verb.on_all_nodes else [self.handle]
        refs = [getattr(handle, verb.name).remote(*arguments, **keywords) for handle in handles]
        return RayPending(refs, f"{verb.name} of engine {self.index}")


@dataclass(frozen=True)
class UpdatableEngines:
    """The engines that take new weights, as the rollout manager describes them to the trainers."""

    engines: list[RayEngine]
    num_new: int
    """Engines started since the trainers last connected; above zero they must connect again."""

    @property
    def handles(self) -> list[Any]:
        """The actors of the engines' first nodes."""
        return [engine.handle for engine in self.engines]
