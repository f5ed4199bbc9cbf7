"""A trainer rank as a Ray actor: the verbs of ``TrainWorker``, with Ray's references resolved on the way in."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import ray

from slime.arguments.hook_checks import check_hooks
from slime.backends.train_worker import TrainWorker
from slime.ray.engine_handles import UpdatableEngines
from slime.ray.ray_actor import RayActor
from slime.ray.waiting import WATCH_GROUP, Watched, wait_for
from slime.utils.env import visible_index
from slime.utils.misc import Box

FETCH_TIMEOUT_S = 3600
"""Deadline for one rank's train data to arrive through the object store; it may be tens of gigabytes."""


class TrainRayActor(Watched, RayActor):
    """Mixed in before a ``TrainWorker`` subclass by :func:`remote_class`."""

    def set_rendezvous(self, world_size: int, rank: int, master_addr: str, master_port: int, gpu_id: int) -> None:
        """The worker's own ``set_rendezvous``; the GPU has its number on the node, of which others may be hidden."""
        super().set_rendezvous(  # type: ignore[misc]
            world_size, rank, master_addr, master_port, visible_index(gpu_id)
        )

    def init(self, args: Namespace, *arguments: Any, **keywords: Any) -> int:
        """The worker's own ``init``, once the user's plug-ins for the trainer have been imported and judged here."""
        check_hooks(args, side="trainer")
        return super().init(args, *arguments, **keywords)  # type: ignore[misc]

    def train_boxed(self, rollout_id: int, boxes: list[Box], external_data: Any = None) -> Any:
        """Fetch this rank's share of the rollout and train on it."""
        dp_rank = self.get_parallel_config()["dp_rank"]  # type: ignore[attr-defined]
        rank_batch = wait_for(
            boxes[dp_rank].inner, what=f"the train data of data-parallel rank {dp_rank}", timeout_s=FETCH_TIMEOUT_S
        )
        return self.train(rollout_id, rank_batch, external_data=external_data)  # type: ignore[attr-defined]

    def connect_engines(self, engines: UpdatableEngines) -> None:
        """Let the weight updater connect to the engines behind the handles."""
        self.connect_rollout_engines(engines.proxies(), engines.num_new)  # type: ignore[attr-defined]


def remote_class(worker_class: type[TrainWorker]) -> Any:
    """The Ray actor class of a trainer: ``worker_class`` with the Ray-side verbs of :class:`TrainRayActor`."""
    combined = type(worker_class.__name__, (TrainRayActor, worker_class), {"__module__": worker_class.__module__})
    return ray.remote(num_gpus=1, concurrency_groups={WATCH_GROUP: 1})(combined)
