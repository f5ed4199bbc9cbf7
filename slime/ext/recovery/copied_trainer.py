"""A trainer whose ranks keep copies of their state in host memory (``--trainer-recovery memory``)."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import ray

from slime.ext.recovery.memory_checkpoints import COPY_GROUP, CopyingRank, MemoryCheckpoints
from slime.ext.recovery.state_copy import CopyFlags
from slime.flags.parse import args_to_resume
from slime.ray.actor_group import RayTrainGroup
from slime.ray.train_actor import TrainRayActor
from slime.utils.misc import Box


class CopiedRank(CopyingRank, TrainRayActor):
    """A rank that sends and fetches copies of its state."""

    concurrency = {**TrainRayActor.concurrency, COPY_GROUP: 1}


class CopiedTrainGroup(RayTrainGroup):
    """A trainer that restarts from its copies if they are complete; its critic is copied with it."""

    rank_class = CopiedRank
    worker = "slime.ext.recovery.copying_worker:CopyingTrainRayActor"

    def __init__(self, args: Namespace, *arguments: Any, **keywords: Any) -> None:
        super().__init__(args, *arguments, **keywords)
        self._critics: list[RayTrainGroup] = []
        self._leader = leader = keywords.get("leader")
        if leader is None:
            self._copies = MemoryCheckpoints(CopyFlags.of(args))
        else:  # a critic: the actor's group copies it, after the actor has trained
            assert isinstance(leader, CopiedTrainGroup)
            leader._critics.append(self)
            self._copies = leader._copies

    def args_to_resume(self) -> Namespace:
        """Make restarted ranks fetch their copies; return the args to resume from these, or from a checkpoint."""
        copied = self._copies.fetch(self.actors, self._leader.world_size if self._leader is not None else 0)
        version, last = self.version.number, self.checkpoints.last
        return args_to_resume(self._run_args, weight_version=version, checkpoint=last, copied=copied)

    def leave_out_checkpoints(self, number: int) -> None:
        """Exclude the newest checkpoints, and the copies, from the next start."""
        self._copies.drop()
        super().leave_out_checkpoints(number)

    def async_train(self, rollout_id: int, rollout_data: list[Box], external_data: Any = None) -> list[ray.ObjectRef]:
        """Train as in the base class, after sending copies that this training would overwrite."""
        self._copies.finish_before(rollout_id)
        return super().async_train(rollout_id, rollout_data, external_data)

    def wait_trained(self, rollout_id: int, refs: list[ray.ObjectRef]) -> list[Any]:
        """Wait as in the base class, then start sending the copies that the ranks have made."""
        results = super().wait_trained(rollout_id, refs)
        if self._leader is None:
            self._copies.begin(rollout_id, [actor for group in (self, *self._critics) for actor in group.actors])
        return results
