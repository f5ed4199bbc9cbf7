"""A trainer that frees all its memory between steps (``--release-train``)."""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from slime.ext.fast_push.disk.disk import FolderCarrier, WrittenVersion
from slime.ext.fast_push.disk.versions import prune_before
from slime.ext.fast_push.push import push_weights
from slime.ray.actor_group import RayTrainGroup
from slime.ray.engines.deadlines import memory_timeout_s
from slime.ray.engines.verbs import EngineList
from slime.ray.push import PUSH_MARGIN_S, WeightPush
from slime.ray.utils import RELEASE_GRACE_S, cluster_has_accelerators
from slime.utils.errors import WeightSyncError
from slime.utils.misc import Box
from slime.weights.push.participants import Participants, PushClock
from slime.weights.push.state import Push


class ReleasedTrainGroup(RayTrainGroup):
    """A trainer that exists only while it trains (``--release-train``); in between, ``actors`` is empty.

        generate -> start the ranks, load the last checkpoint -> train -> save -> write the weights -> end the ranks
                 -> the driver has the engines read the weights -> generate

    While the engines generate, the trainer occupies no GPU or host memory.
    """

    leaves_between_steps = True

    def __init__(self, args: Namespace, *arguments: Any, **keywords: Any) -> None:
        super().__init__(args, *arguments, **keywords)
        self.push = ReleasedPush(self)

    def async_train(self, rollout_id: int, rollout_data: list[Box], external_data: Any = None) -> list[ray.ObjectRef]:
        """Start the ranks if they have ended, then train as the base class does."""
        if not self.actors:
            self.create()
        return super().async_train(rollout_id, rollout_data, external_data)

    def write_checkpoint(self, rollout_id: int, force_sync: bool = False) -> None:
        """Save as the base class does, but never in the background, because the ranks end afterwards."""
        super().write_checkpoint(rollout_id, force_sync=True)


class ReleasedPush(WeightPush):
    """Pushes, from the driver, the weights that the trainer left on disk."""

    def __init__(self, trainer: RayTrainGroup) -> None:
        super().__init__(trainer)
        self._written: WrittenVersion | None = None
        """The version that the trainer wrote to disk last."""

    def update(self) -> dict[str, float]:
        """Write the weights and end the ranks, have the engines allocate memory, then push as the base class does."""
        if self.args.debug_train_only:
            return {}
        self._hand_over_weights()
        if self.args.offload_rollout:
            timeout_s = memory_timeout_s(self.args.engine_start_timeout_s, self.args.weight_update_timeout_s)
            self.ask_manager("onload_weights", timeout_s=timeout_s)
        return super().update()

    def _hand_over_weights(self) -> None:
        """Have the ranks write the weights to disk, then end them; their memory is free when this returns."""
        trainer = self.trainer
        if not trainer.actors:
            return
        engines = self.ask_manager("describe_engines", "updatable")
        # The ranks are new and know no engines, but the post-write hook receives the engines.
        trainer.on_all("connect_engines", replace(engines, num_new=1), what="the trainers' list of engines")
        timeout_s = self.args.weight_update_timeout_s + PUSH_MARGIN_S
        trainer.version.count(self.args.save)
        self._written = trainer.on_all("write_weights", what="the weights on disk", timeout_s=timeout_s)[0]
        assert self._written is not None
        trainer.version.number = self._written.number
        trainer.release(flushes=True)
        if cluster_has_accelerators():
            time.sleep(RELEASE_GRACE_S)

    def send(self, verb: str, engines: EngineList) -> dict[str, float]:
        """Have engines, including late ones, read the weights that the trainer left; return the metrics."""
        args = self.args
        if self._written is None:
            raise WeightSyncError("the trainer has written no weights to disk; call update_weights first")
        if engines.num_new:
            self.ask_manager("clear_updatable_num_new_engines")
        push = Push(
            str(self._written.number),
            Participants(engines.unpacked(), PushClock(args.weight_update_timeout_s)),
            repacks=self._written.repacks,
            checks=args.check_weight_update_equal,
        )
        try:
            report = push_weights(push, self._written, FolderCarrier(push.ranks))
        finally:
            self.excluded = list(push.participants.excluded)
        if not args.update_weight_disk_keep_files:
            prune_before(Path(args.update_weight_disk_dir), self._written.number)
        return report.as_metrics()
