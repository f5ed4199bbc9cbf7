"""Ray handles of engines, as the ``EngineProxy`` that a weight push talks to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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


class RayEngine(EngineProxy):
    """One engine: each verb becomes a remote call of the engine actor's method of the same name."""

    def __init__(
        self,
        handle: Any,
        *,
        index: int,
        num_gpus: int,
        gpu_offset: int,
        is_colocated: bool,
        acknowledges: bool = False,
        dtype: str = "",
        node_handles: Sequence[Any] = (),
    ) -> None:
        self.handle = handle
        self.node_handles = list(node_handles) or [handle]
        self.acknowledges = acknowledges
        self.dtype = dtype
        self.index = index
        self.num_gpus = num_gpus
        self.gpu_offset = gpu_offset
        self.is_colocated = is_colocated

    def start(self, verb: Verb, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> RayPending:
        """Call the method on the actor of the first node, or on those of all nodes."""
        handles = self.node_handles if verb.on_all_nodes else [self.handle]
        refs = [getattr(handle, verb.name).remote(*arguments, **keywords) for handle in handles]
        return RayPending(refs, f"{verb.name} of engine {self.index}")


@dataclass(frozen=True, kw_only=True)
class UpdatableEngines:
    """The engines that take new weights, as the rollout manager describes them to the trainers."""

    handles: list[Any]
    gpu_counts: list[int]
    gpu_offsets: list[int]
    """First GPU of each engine, counted from the first GPU of the placement group."""
    num_new: int
    """Engines started since the trainers last connected; above zero they must connect again."""
    num_trainer_gpus: int
    """GPUs [0, this) belong to the trainers; an engine inside that range is colocated."""
    node_handles: list[list[Any]] = field(default_factory=list)
    """The actors of each engine, one a node, the one in ``handles`` first; empty where every engine has one node."""
    acknowledges: list[bool] = field(default_factory=list)
    """True for each engine in which our loader runs; empty where it does in none."""
    dtypes: list[str] = field(default_factory=list)
    """The dtype in which each engine computes; empty where it is the trainer's."""

    def proxies(self) -> list[RayEngine]:
        """Return one proxy for each engine."""
        return [
            RayEngine(
                handle,
                index=index,
                num_gpus=count,
                gpu_offset=offset,
                is_colocated=offset + count <= self.num_trainer_gpus,
                node_handles=self.node_handles[index] if self.node_handles else (),
                acknowledges=bool(self.acknowledges) and self.acknowledges[index],
                dtype=self.dtypes[index] if self.dtypes else "",
            )
            for index, (handle, count, offset) in enumerate(
                zip(self.handles, self.gpu_counts, self.gpu_offsets, strict=True)
            )
        ]
