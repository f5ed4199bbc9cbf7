"""A trainer that is there only while it trains (``--release-train``).

    generate -> start the ranks, load the last checkpoint -> train -> save -> write the weights -> end the ranks
             -> the driver has the engines read them -> generate

Nothing of the trainer stays in any memory while the engines generate.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from slime.arguments import args_to_resume
from slime.ray.actor_group import PUSH_MARGIN_S, RayTrainGroup
from slime.ray.engine_handles import UpdatableEngines
from slime.ray.utils import cluster_has_accelerators
from slime.ray.waiting import wait_for
from slime.utils.errors import WeightSyncError
from slime.utils.misc import Box
from slime.weights.push.participants import Participants, PushClock
from slime.weights.push.push import push_weights
from slime.weights.push.state import Push
from slime.weights.push.transports.disk import FolderTransport, WrittenVersion
from slime.weights.versions import prune_before

logger = logging.getLogger(__name__)

RELEASE_GRACE_S = 5.0
"""After a kill, until a driver has taken the memory of the GPU back."""


class ReleasedTrainGroup(RayTrainGroup):
    """The ranks start with ``train`` and end with ``hand_over_weights``; in between, ``actors`` is empty."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._run_args = self.args
        self._is_saved = False
        """A checkpoint of this job exists; until then the ranks start as they did first."""
        self._written: WrittenVersion | None = None
        """What the trainer left on disk last."""

    def train(self, rollout_id: int, rollout_data: list[Box], external_data: Any = None) -> dict[str, float]:
        """As the base class; starts the ranks where they have ended."""
        if not self.actors:
            version = self._written.number if self._written is not None else 0
            self.args = args_to_resume(self._run_args, weight_version=version, is_saved=self._is_saved)
            self.create()
        return super().train(rollout_id, rollout_data, external_data)

    def publish_checkpoint(self, rollout_id: int) -> None:
        """As the base class; the next ranks start from this checkpoint."""
        super().publish_checkpoint(rollout_id)
        self._is_saved = True

    def hand_over_weights(self) -> None:
        """Have the weights written to disk, and end every rank: its memory is free when this returns."""
        if self.args.debug_train_only or not self.actors:
            return
        engines = self._updatable_engines()
        # These ranks have never seen an engine; the hook after the write gets them.
        self._on_all("connect_engines", replace(engines, num_new=1), what="the trainers' list of engines")
        timeout_s = self.args.weight_update_timeout_s + PUSH_MARGIN_S
        written = self._on_all("write_weights", what="the weights on disk", timeout_s=timeout_s)
        self._written = written[0]
        self.release()
        if cluster_has_accelerators():
            time.sleep(RELEASE_GRACE_S)

    def update_weights(self) -> dict[str, float]:
        """Have every engine that takes updates read what the trainer left; gives the metrics of the push."""
        if self.args.debug_train_only:
            return {}
        engines = self._updatable_engines()
        return self._deliver(engines) if engines.handles else {}

    def resend_weights(self, engines: UpdatableEngines) -> None:
        """Engines that started late read what the others have read."""
        self._deliver(engines)

    def _updatable_engines(self) -> UpdatableEngines:
        timeout_s = self.args.weight_update_timeout_s
        return wait_for(self._manager.get_updatable_engines.remote(), what="the list of engines", timeout_s=timeout_s)

    def _deliver(self, engines: UpdatableEngines) -> dict[str, float]:
        args = self.args
        if self._written is None:
            raise WeightSyncError("the trainer has left no weights on disk; hand_over_weights comes first")
        if engines.num_new:
            self._tell_manager("clear_updatable_num_new_engines")
        push = Push(
            str(self._written.number),
            Participants(engines.proxies(), PushClock(args.weight_update_timeout_s)),
            repacks=self._written.repacks,
            checks=args.check_weight_update_equal,
        )
        try:
            report = push_weights(push, self._written, FolderTransport())
        finally:
            self.fenced = list(push.participants.excluded)
        self._tell_manager("admit_updated_engines", self.fenced)
        if not args.update_weight_disk_keep_files:
            prune_before(Path(args.update_weight_disk_dir), self._written.number)
        return report.as_metrics()

    def _tell_manager(self, method: str, *arguments: Any) -> None:
        ref: ray.ObjectRef = getattr(self._manager, method).remote(*arguments)
        wait_for(ref, what="the rollout manager", timeout_s=self.args.weight_update_timeout_s)
