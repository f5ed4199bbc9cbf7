"""All ranks of one trainer (actor or critic), driven as one: a verb goes to every rank."""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from slime.arguments import args_to_resume
from slime.backends.train_worker import TrainWorker
from slime.ray.engine_handles import UpdatableEngines
from slime.ray.placement_group import GpuSlice, strategy_for
from slime.ray.train_actor import remote_class, trainer_environment
from slime.ray.utils import cluster_has_accelerators
from slime.ray.waiting import forget, wait_for, watch
from slime.utils.errors import CheckpointError, WeightSyncError
from slime.utils.misc import Box
from slime.weights.push.participants import ExcludedEngine, Participants, PushClock
from slime.weights.push.push import push_weights
from slime.weights.push.state import Push
from slime.weights.push.transports.disk import FolderTransport, WrittenVersion
from slime.weights.versions import prune_before

logger = logging.getLogger(__name__)

PUSH_MARGIN_S = 120.0
"""What a push may take beyond its own deadline, for the trainers' meetings after the last engine was late."""
RELEASE_GRACE_S = 5.0
"""After a kill, until a driver has taken the memory of the GPU back."""


class RayTrainGroup:
    """One trainer: ``num_nodes x num_gpus_per_node`` ranks, rank r on the r-th GPU of the placement.

    Args:
        args: the run's arguments (of the role, when roles differ).
        num_nodes: nodes of the trainer.
        num_gpus_per_node: ranks on each of them.
        pg: the GPUs, at least as many as ranks.
        num_gpus_per_actor: the share of a GPU bundle that one rank reserves.
        role: "actor" or "critic".
        with_ref: whether to load the reference model.
        with_opd_teacher: whether to load the distillation teacher.
        actor_cls: the worker class; the Megatron trainer when None.
    """

    def __init__(
        self,
        args: Namespace,
        num_nodes: int,
        num_gpus_per_node: int,
        pg: GpuSlice,
        num_gpus_per_actor: float = 0.4,
        role: str = "actor",
        with_ref: bool = False,
        with_opd_teacher: bool = False,
        actor_cls: type[TrainWorker] | None = None,
    ) -> None:
        self.args = args
        self.role = role
        self.with_ref = with_ref
        self.with_opd_teacher = with_opd_teacher
        self.world_size = num_nodes * num_gpus_per_node
        self._pg = pg
        self._num_gpus_per_actor = num_gpus_per_actor
        self._actor_cls = actor_cls
        self._manager: Any = None
        self._layouts: list[dict[str, int]] = []
        self.actors: list[Any] = []
        self.excluded: list[ExcludedEngine] = []
        """The engines that the last push excluded and that were not reported yet."""
        self.start_rollout_id: int = 0

    # Life

    def create(self) -> int:
        """Start every rank, load the model, and return the first rollout to run (equal on all ranks)."""
        self._spawn()
        start_ids = self._on_all(
            "init", self.args, self.role, self.with_ref, self.with_opd_teacher, what="model set-up"
        )
        if len(set(start_ids)) != 1:
            raise CheckpointError(
                f"{self.role} ranks resumed at different rollouts: {start_ids}; their checkpoints are of different "
                "saves"
            )
        self.start_rollout_id = start_ids[0]
        return self.start_rollout_id

    def _spawn(self) -> None:
        worker_class = self._actor_cls
        if worker_class is None:
            from slime.backends.megatron_utils.actor import MegatronTrainRayActor

            worker_class = MegatronTrainRayActor
        options = {
            "num_cpus": self._num_gpus_per_actor,
            "num_gpus": self._num_gpus_per_actor,
            "runtime_env": {"env_vars": trainer_environment(self.args, self.world_size)},
        }
        remote = remote_class(worker_class)
        first = remote.options(scheduling_strategy=strategy_for(self._pg, 0), **options).remote()
        address, port = wait_for(
            first.get_master_addr_and_port.remote(), what=f"the first {self.role} rank to start", timeout_s=600
        )
        self.actors = [first] + [
            remote.options(scheduling_strategy=strategy_for(self._pg, rank), **options).remote()
            for rank in range(1, self.world_size)
        ]
        for rank, actor in enumerate(self.actors):
            watch(actor, f"{self.role} rank {rank}")
        self._wait(
            [
                actor.set_rendezvous.remote(self.world_size, rank, address, port, self._pg.gpu_ids[rank])
                for rank, actor in enumerate(self.actors)
            ],
            "rendezvous",
        )

    def layouts(self) -> list[dict[str, int]]:
        """Return every rank's parallel group sizes and its place in them (``TrainWorker.get_parallel_config``)."""
        if not self._layouts:
            self._layouts = self._on_all("get_parallel_config", what="the trainer's layout", timeout_s=120)
        return self._layouts

    def set_rollout_manager(self, rollout_manager: Any) -> None:
        """Tell the manager how the trainer is laid out; it needs that to split the train data."""
        self._manager = rollout_manager
        config = self.layouts()[0]
        wait_for(rollout_manager.set_train_parallel_config.remote(config), what="the rollout manager", timeout_s=120)

    def release(self) -> None:
        """Kill every rank.  Ray counts their resources as free some seconds later, when the processes have gone."""
        for rank, actor in enumerate(self.actors):
            forget(f"{self.role} rank {rank}")
            ray.kill(actor)
        self.actors = []

    # Work

    def async_train(self, rollout_id: int, rollout_data: list[Box], external_data: Any = None) -> list[ray.ObjectRef]:
        """Start a training step on every rank; a list of external data, or references to it, is dealt out to them."""
        per_rank = external_data if isinstance(external_data, list) else [external_data] * len(self.actors)
        return [
            actor.train_boxed.remote(rollout_id, rollout_data, external_data=data)
            for actor, data in zip(self.actors, per_rank, strict=True)
        ]

    def train(self, rollout_id: int, rollout_data: list[Box], external_data: Any = None) -> dict[str, float]:
        """Train on one rollout and wait; return the metrics of the main rank."""
        refs = self.async_train(rollout_id, rollout_data, external_data)
        return next((result for result in self.wait_trained(rollout_id, refs) if result), {})

    def wait_trained(self, rollout_id: int, refs: list[ray.ObjectRef]) -> list[Any]:
        """Wait for what ``async_train`` started; return what each rank returned."""
        return self._wait(refs, what=f"training on rollout {rollout_id}")

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Write the checkpoint of ``rollout_id``; it does not count until :meth:`publish_checkpoint`."""
        self._on_all("save_model", rollout_id, force_sync, what=f"checkpoint {rollout_id}")

    def publish_checkpoint(self, rollout_id: int) -> None:
        """Make the checkpoint of ``rollout_id`` the one to resume from.  The last act of a save."""
        self._on_all("publish_checkpoint", rollout_id, what=f"publishing checkpoint {rollout_id}")

    def hand_over_weights(self) -> None:
        """Do nothing before the engines take room for weights: the trainer stays where it is."""

    def update_weights(self) -> dict[str, float]:
        """Push the present weights to every engine that takes updates; return the metrics of the push."""
        if self.args.debug_train_only:
            return {}
        self.excluded = []
        engines = self._ask_manager("push_started")
        if not engines.handles:
            return {}
        if engines.num_new:
            self._connect(engines)
        results = self._push("update_weights", "the weight update")
        return next((result for result in results if result), {})

    def resend_weights(self, engines: UpdatableEngines) -> None:
        """Give engines that started late what the others got with the last push, under the same version."""
        self._connect(engines)
        self._push("resend_weights", "the weights of new engines")

    def _connect(self, engines: UpdatableEngines) -> None:
        self._on_all("connect_engines", engines, what="the trainers' connection to the engines")
        self._ask_manager("clear_updatable_num_new_engines")

    def _push(self, verb: str, what: str) -> list[Any]:
        """Push once and report the engines that took the weights; :attr:`excluded` has the others.

        The trainers keep the deadline of the push themselves, and know who was late.
        """
        try:
            results = self._on_all(verb, what=what, timeout_s=self.args.weight_update_timeout_s + PUSH_MARGIN_S)
        except WeightSyncError:
            self.excluded = self._ask_excluded()
            raise
        self.excluded = self._ask_excluded()
        self._ask_manager("push_done", self.excluded)
        return results

    def _ask_excluded(self) -> list[ExcludedEngine]:
        excluded: ray.ObjectRef = self.actors[0].excluded_engines.remote()
        return wait_for(excluded, what="the engines that the push excluded", timeout_s=PUSH_MARGIN_S)

    def _ask_manager(self, method: str, *arguments: Any) -> Any:
        ref: ray.ObjectRef = getattr(self._manager, method).remote(*arguments)
        what = f"the rollout manager ({method})"
        return wait_for(ref, what=what, timeout_s=self.args.weight_update_timeout_s)

    def onload(self) -> None:
        """Bring the trainer's memory back to the GPUs."""
        self._on_all("wake_up", what="trainer wake-up")

    def offload(self) -> None:
        """Take the trainer's memory off the GPUs."""
        self._on_all("sleep", what="trainer sleep")

    def clear_memory(self) -> None:
        """Return cached, unused GPU memory to the driver."""
        self._on_all("clear_memory", what="freeing cached memory")

    def _on_all(self, verb: str, *arguments: Any, what: str, timeout_s: float | None = None) -> list[Any]:
        return self._wait([getattr(actor, verb).remote(*arguments) for actor in self.actors], what, timeout_s)

    def _wait(self, refs: list[ray.ObjectRef], what: str, timeout_s: float | None = None) -> list[Any]:
        return wait_for(refs, what=f"{what} ({self.role})", timeout_s=timeout_s or self.args.train_timeout_s)


class ReleasedTrainGroup(RayTrainGroup):
    """A trainer that is there only while it trains (``--release-train``); in between, ``actors`` is empty.

        generate -> start the ranks, load the last checkpoint -> train -> save -> write the weights -> end the ranks
                 -> the driver has the engines read them -> generate

    Nothing of the trainer stays in any memory while the engines generate.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._run_args = self.args
        self._is_saved = False
        """A checkpoint of this job exists; until then the ranks start as they did first."""
        self._written: WrittenVersion | None = None
        """Version that the trainer wrote to disk last."""

    def train(self, rollout_id: int, rollout_data: list[Box], external_data: Any = None) -> dict[str, float]:
        """Train as the base class does; starts the ranks where they have ended."""
        if not self.actors:
            version = self._written.number if self._written is not None else 0
            self.args = args_to_resume(self._run_args, weight_version=version, is_saved=self._is_saved)
            self.create()
        return super().train(rollout_id, rollout_data, external_data)

    def publish_checkpoint(self, rollout_id: int) -> None:
        """Publish as the base class does; the next ranks start from this checkpoint."""
        super().publish_checkpoint(rollout_id)
        self._is_saved = True

    def hand_over_weights(self) -> None:
        """Have the weights written to disk, and end every rank: its memory is free when this returns."""
        if self.args.debug_train_only or not self.actors:
            return
        engines = self._ask_manager("get_updatable_engines")
        # These ranks have never seen an engine; the hook after the write gets them.
        self._on_all("connect_engines", replace(engines, num_new=1), what="the trainers' list of engines")
        timeout_s = self.args.weight_update_timeout_s + PUSH_MARGIN_S
        written = self._on_all("write_weights", what="the weights on disk", timeout_s=timeout_s)
        self._written = written[0]
        self.release()
        if cluster_has_accelerators():
            time.sleep(RELEASE_GRACE_S)

    def update_weights(self) -> dict[str, float]:
        """Have every engine that takes updates read what the trainer left; return the metrics of the push."""
        if self.args.debug_train_only:
            return {}
        engines = self._ask_manager("push_started")
        return self._deliver(engines) if engines.handles else {}

    def resend_weights(self, engines: UpdatableEngines) -> None:
        """Have engines that started late read what the others have read."""
        self._deliver(engines)

    def _deliver(self, engines: UpdatableEngines) -> dict[str, float]:
        args = self.args
        if self._written is None:
            raise WeightSyncError("the trainer has written no weights to disk; call hand_over_weights first")
        if engines.num_new:
            self._ask_manager("clear_updatable_num_new_engines")
        push = Push(
            str(self._written.number),
            Participants(engines.proxies(), PushClock(args.weight_update_timeout_s)),
            repacks=self._written.repacks,
            checks=args.check_weight_update_equal,
        )
        try:
            report = push_weights(push, self._written, FolderTransport())
        finally:
            self.excluded = list(push.participants.excluded)
        self._ask_manager("push_done", self.excluded)
        if not args.update_weight_disk_keep_files:
            prune_before(Path(args.update_weight_disk_dir), self._written.number)
        return report.as_metrics()
