"""Ray handles of engines, dressed as the ``WeightReceiver`` that a weight sender talks to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from slime.ray.waiting import wait_for


@dataclass(frozen=True)
class RayPending:
    """An engine's answer that is on its way."""

    ref: ray.ObjectRef
    what: str

    def wait(self, timeout_s: float) -> Any:
        """The answer.

        Raises:
            ProcessError: the engine died, refused, or did not answer within ``timeout_s`` seconds.
        """
        return wait_for(self.ref, what=self.what, timeout_s=timeout_s)


@dataclass(frozen=True)
class RayPendingOfNodes:
    """The answers of all nodes of one engine."""

    refs: list[ray.ObjectRef]
    what: str

    def wait(self, timeout_s: float) -> Any:
        """The first node's answer, once all have answered.  Raises as :class:`RayPending`."""
        return wait_for(self.refs, what=self.what, timeout_s=timeout_s)[0]


class RayWeightReceiver:
    """One engine, as a weight sender sees it: every method returns a :class:`RayPending` at once.

    The methods are those of ``slime.weights.receiver.WeightReceiver``; each becomes a remote call of the engine
    actor's method of the same name.
    """

    METHODS = frozenset(
        {
            "pause_generation",
            "continue_generation",
            "flush_cache",
            "init_weights_update_group",
            "destroy_weights_update_group",
            "update_weights_from_tensor",
            "update_weights_from_distributed",
            "update_weights_from_disk",
            "get_weight_version",
            "check_weights",
            "post_process_weights",
            "begin_weight_update",
            "receive_weight_bucket",
            "receive_weight_buckets",
            "join_weight_group",
            "leave_weight_group",
            "acknowledge_weight_update",
            "commit_weight_update",
            "receive_weight_folder",
        }
    )
    ON_ALL_NODES = frozenset({"pull_weights"})
    """Each node of the engine has work to do; the other methods are answered by the first."""

    def __init__(
        self,
        handle: Any,
        *,
        index: int,
        num_gpus: int,
        gpu_offset: int,
        is_colocated: bool,
        acknowledges: bool = False,
        node_handles: Sequence[Any] = (),
    ) -> None:
        self.handle = handle
        self.node_handles = list(node_handles) or [handle]
        self.acknowledges = acknowledges
        self.index = index
        self.num_gpus = num_gpus
        self.gpu_offset = gpu_offset
        self.is_colocated = is_colocated

    def __getattr__(self, name: str) -> Any:
        if name not in self.METHODS | self.ON_ALL_NODES:
            known = ", ".join(sorted(self.METHODS | self.ON_ALL_NODES))
            raise AttributeError(f"an engine receives no {name!r}; it receives {known}")

        def call(*args: Any, **kwargs: Any) -> RayPending | RayPendingOfNodes:
            what = f"{name} of engine {self.index}"
            if name in self.ON_ALL_NODES:
                refs = [getattr(handle, name).remote(*args, **kwargs) for handle in self.node_handles]
                return RayPendingOfNodes(refs, what)
            return RayPending(getattr(self.handle, name).remote(*args, **kwargs), what)

        return call


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
    """Whether our loader runs in each engine; empty where it does in none."""

    def receivers(self) -> list[RayWeightReceiver]:
        """One receiver per engine."""
        return [
            RayWeightReceiver(
                handle,
                index=index,
                num_gpus=count,
                gpu_offset=offset,
                is_colocated=offset + count <= self.num_trainer_gpus,
                node_handles=self.node_handles[index] if self.node_handles else (),
                acknowledges=bool(self.acknowledges) and self.acknowledges[index],
            )
            for index, (handle, count, offset) in enumerate(
                zip(self.handles, self.gpu_counts, self.gpu_offsets, strict=True)
            )
        ]
