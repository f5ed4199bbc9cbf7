"""All ranks of one trainer (actor or critic), driven as one: a verb goes to every rank."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

import ray

from slime.backends.train_worker import TrainWorker
from slime.ray.engine_handles import UpdatableEngines
from slime.ray.placement_group import GpuSlice, strategy_for
from slime.ray.train_actor import remote_class
from slime.ray.trainer_env import trainer_environment
from slime.ray.waiting import forget, wait_for, watch
from slime.utils.errors import CheckpointError, WeightSyncError
from slime.utils.misc import Box
from slime.weights.push.participants import ExcludedEngine

logger = logging.getLogger(__name__)

PUSH_MARGIN_S = 120.0
"""What a push may take beyond its own deadline, for the trainers' meetings after the last engine was late."""


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
        self.fenced: list[ExcludedEngine] = []
        """The engines that the last push left out."""
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
                f"{self.role} ranks resumed at different rollouts: {start_ids}; the checkpoint is torn"
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
        """Of every rank: sizes of the parallel groups and its place in them (``TrainWorker.get_parallel_config``)."""
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
        """Train on one rollout and wait; gives the metrics of the main rank."""
        refs = self.async_train(rollout_id, rollout_data, external_data)
        return next((result for result in self.wait_trained(rollout_id, refs) if result), {})

    def wait_trained(self, rollout_id: int, refs: list[ray.ObjectRef]) -> list[Any]:
        """Wait for what ``async_train`` started; gives what each rank returned."""
        return self._wait(refs, what=f"training on rollout {rollout_id}")

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Write the checkpoint of ``rollout_id``; it does not count until :meth:`publish_checkpoint`."""
        self._on_all("save_model", rollout_id, force_sync, what=f"checkpoint {rollout_id}")

    def publish_checkpoint(self, rollout_id: int) -> None:
        """Make the checkpoint of ``rollout_id`` the one to resume from.  The last act of a save."""
        self._on_all("publish_checkpoint", rollout_id, what=f"publishing checkpoint {rollout_id}")

    def hand_over_weights(self) -> None:
        """Before the engines take room for weights: nothing, while the trainer stays where it is."""

    def update_weights(self) -> dict[str, float]:
        """Push the present weights to every engine that takes updates; gives the metrics of the push."""
        if self.args.debug_train_only:
            return {}
        self.fenced = []
        timeout_s = self.args.weight_update_timeout_s
        engines = wait_for(
            self._manager.get_updatable_engines.remote(), what="the list of engines", timeout_s=timeout_s
        )
        if not engines.handles:
            return {}
        if engines.num_new:
            self._on_all("connect_engines", engines, what="the trainers' connection to the engines")
            wait_for(
                self._manager.clear_updatable_num_new_engines.remote(), what="the rollout manager", timeout_s=timeout_s
            )
        results = self._push("update_weights", "the weight update")
        return next((result for result in results if result), {})

    def resend_weights(self, engines: UpdatableEngines) -> None:
        """Give engines that started late what the others got with the last push, under the same version."""
        timeout_s = self.args.weight_update_timeout_s
        self._on_all("connect_engines", engines, what="the trainers' connection to new engines")
        wait_for(
            self._manager.clear_updatable_num_new_engines.remote(), what="the rollout manager", timeout_s=timeout_s
        )
        self._push("resend_weights", "the weights of new engines")

    def _push(self, verb: str, what: str) -> list[Any]:
        """One push; engines that took the weights may get requests, :attr:`fenced` has the others.

        The trainers keep the deadline of the push themselves, and know who was late.
        """
        timeout_s = self.args.weight_update_timeout_s
        try:
            results = self._on_all(verb, what=what, timeout_s=timeout_s + PUSH_MARGIN_S)
        except WeightSyncError:
            self.fenced = self._ask_fenced()
            raise
        self.fenced = self._ask_fenced()
        wait_for(
            self._manager.admit_updated_engines.remote(self.fenced), what="the rollout manager", timeout_s=timeout_s
        )
        return results

    def _ask_fenced(self) -> list[ExcludedEngine]:
        return wait_for(
            self.actors[0].excluded_engines.remote(), what="the engines left out by the push", timeout_s=PUSH_MARGIN_S
        )

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
