"""All ranks of one trainer (actor or critic), driven as one: a verb goes to every rank."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from slime.backends.train_worker import TrainWorker
from slime.flags.checkpoint import TRACKER, VersionCount, read_tracker
from slime.flags.parse import args_to_resume
from slime.observability.telemetry import FLUSH_TIMEOUT_S
from slime.ray.engines.memory import memory_timeout_s
from slime.ray.engines.weights import UpdatableEngines
from slime.ray.gpus import GpuSlice
from slime.ray.parts import CORE, Parts
from slime.ray.train_actor import Heartbeats, TrainRayActor, start_ranks
from slime.ray.waiting import forget, wait_for
from slime.utils.errors import CheckpointError, HangError, ProcessError, WeightSyncError
from slime.utils.misc import Box
from slime.weights.push.participants import ExcludedEngine

logger = logging.getLogger(__name__)

MAX_PUSHES = 4
"""Pushes of the same weights that no engine took, each to engines started anew, after which the run ends."""
MAX_FAILED_RESENDS = 3
"""Failures in a row of new engines to take weights, after which the run ends."""
HEARTBEAT_EVERY_S = 2.0
"""How often the driver asks the ranks that it waits for how far they are."""
PUSH_MARGIN_S = 120.0
"""Time of a push beyond its own deadline, for the trainers' collectives after the last engine was late."""


class RayTrainGroup:
    """One trainer: ``num_nodes x num_gpus_per_node`` ranks, rank r on the r-th GPU of the placement.

    Args:
        args: the run's arguments (of the role, when roles differ).
        num_nodes: nodes of the trainer; without any, there is no trainer, and the verbs do nothing.
        num_gpus_per_node: ranks on each of them.
        pg: the GPUs, at least as many as ranks.
        num_gpus_per_actor: the share of a GPU bundle that one rank reserves.
        role: "actor" or "critic".
        with_ref: whether to load the reference model.
        with_opd_teacher: whether to load the distillation teacher.
        actor_cls: the worker class; the Megatron trainer when None.
        parts: of the run.
    """

    rank_class: type[TrainRayActor] = TrainRayActor
    """Gives a worker its verbs as a Ray actor."""

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
        parts: Parts = CORE,
    ) -> None:
        self.args = args
        self.role = role
        self.with_ref = with_ref
        self.with_opd_teacher = with_opd_teacher
        self.world_size = num_nodes * num_gpus_per_node
        self.gpus, self._num_gpus_per_actor, self._actor_cls = pg, num_gpus_per_actor, actor_cls
        self.parts = parts
        self._leader: RayTrainGroup | None = None
        self._manager: Any = None
        self._layouts: list[dict[str, int]] = []
        self.deal_external_data: Callable[[list[Any]], list[Any]] = list
        """From a list of another role's, one entry for each of its ranks, to one for each rank here."""
        self.actors: list[Any] = []
        self._heartbeats: Heartbeats | None = None
        self.excluded: list[ExcludedEngine] = []
        """The engines that the last push excluded and that were not reported yet."""
        self.start_rollout_id: int = 0
        self._run_args, self._failed_resends = args, 0
        self._was_created = self._is_connected = False
        self._published: set[int] = set()
        self._left_out: set[int] = set()
        self._version = VersionCount()

    # Life

    def create(self) -> int:
        """Start every rank, load the model, and return the first rollout to run (equal on all ranks).

        After the first time the ranks resume from the last checkpoint of this job; without one they start as they did
        first.
        """
        self._spawn()
        if self._was_created:
            self.args = self.args_to_resume()
        chosen = (self.parts.transforms, self.parts.transport) if self.role == "actor" else ()
        kept = self.with_ref, self.with_opd_teacher, *chosen
        start_ids = self._on_all("init", self.args, self.role, *kept, what="model set-up")
        if len(set(start_ids)) != 1:
            raise CheckpointError(f"{self.role} ranks resumed at different rollouts, of different saves: {start_ids}")
        self.start_rollout_id = start_ids[0]
        self._version.start(self.args, self.start_rollout_id)
        self._was_created, self._is_connected = True, False
        return self.start_rollout_id

    def args_to_resume(self) -> Namespace:
        """Return the args by which fresh ranks take the place of others."""
        return args_to_resume(self._run_args, weight_version=self._version.number, checkpoint=self.last_checkpoint)

    def follow(self, leader: RayTrainGroup) -> None:
        """Resume from the checkpoints of ``leader``."""
        self._leader = leader

    @property
    def names(self) -> list[str]:
        """The names of the ranks in messages."""
        return [f"{self.role} rank {rank}" for rank in range(self.world_size)]

    @property
    def last_checkpoint(self) -> int | None:
        """The rollout of the newest checkpoint of this job; with ``--async-save`` only one that is written."""
        return max((self._leader or self)._written_checkpoints(), default=None)

    def leave_out_checkpoints(self, number: int) -> None:
        """Resume from an older one after the next start: so many of the newest no longer count."""
        self._left_out.update(sorted(self._written_checkpoints(), reverse=True)[:number])

    def _written_checkpoints(self) -> set[int]:
        tracker = Path(self._run_args.save or "") / TRACKER
        newest = read_tracker(tracker, "--save") if tracker.is_file() else None
        if not isinstance(newest, int) or newest not in self._published:
            return set()
        return {rollout_id for rollout_id in self._published - self._left_out if rollout_id <= newest}

    def begin(self) -> None:
        """Start the processes of the ranks, which import for many seconds; :meth:`create` goes on with them."""
        if self.world_size and not self.actors:
            self.actors = start_ranks(
                self._actor_cls,
                self.args,
                self.gpus,
                self.names,
                gpu_share=self._num_gpus_per_actor,
                parts=self.parts,
                rank_class=self.rank_class,
            )

    def _spawn(self) -> None:
        self.begin()
        asked = self.actors[0].get_master_addr_and_port.remote()
        address, port = wait_for(asked, what=f"the first {self.role} rank to start", timeout_s=600)
        self._wait(
            [
                actor.set_rendezvous.remote(self.world_size, rank, address, port, self.gpus.gpu_ids[rank])
                for rank, actor in enumerate(self.actors)
            ],
            "rendezvous",
        )
        # From here on every rank has answered once.
        self._heartbeats = Heartbeats(
            dict(zip(self.names, self.actors, strict=True)), self.args.trainer_hang_timeout_s
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

    def finish(self) -> None:
        """End every rank after it has written what it has recorded; one that cannot ends without."""
        try:
            self._on_all("flush_telemetry", what="the trainer's record", timeout_s=2 * FLUSH_TIMEOUT_S)
        except ProcessError as error:
            logger.warning("The record of the last rollout may lack the %s's part: %s", self.role, error)
        self.release()

    def release(self) -> None:
        """Kill every rank.  Ray counts their resources as free some seconds later, when the processes have gone."""
        for actor, name in zip(self.actors, self.names, strict=False):  # a death while they start leaves fewer
            forget(name)
            ray.kill(actor)
        self.actors, self._heartbeats = [], None

    # Work

    def async_train(self, rollout_id: int, rollout_data: list[Box], external_data: Any = None) -> list[ray.ObjectRef]:
        """Start a training step on every rank; give a reference for each.

        ``external_data`` is for all ranks, or a list, of what a critic's ranks return or of references to it: each
        rank gets its own.
        """
        is_list = isinstance(external_data, list)
        per_rank = self.deal_external_data(external_data) if is_list else [external_data] * len(self.actors)
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
        results = self._wait(refs, what=f"training on rollout {rollout_id}")
        self._version.rollout_id = rollout_id
        return results

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Save the checkpoint of ``rollout_id``, and the position in the data with it, and make it count.

        A driver that saves several roles as one calls the parts: :meth:`write_checkpoint` of each, then
        :meth:`publish_checkpoint`.
        """
        self.write_checkpoint(rollout_id, force_sync)
        if self._manager is not None and self.args.rollout_global_dataset:
            # A checkpoint that counts has one.
            self._ask_manager("save", rollout_id, timeout_s=self.args.train_timeout_s)
        self.publish_checkpoint(rollout_id)
        if self._manager is not None:
            self._ask_manager("record_published", rollout_id)

    def write_checkpoint(self, rollout_id: int, force_sync: bool = False) -> None:
        """Write the checkpoint of ``rollout_id``; it does not count until :meth:`publish_checkpoint`."""
        self._on_all("save_model", rollout_id, force_sync, what=f"checkpoint {rollout_id}")

    def publish_checkpoint(self, rollout_id: int) -> None:
        """Make the checkpoint of ``rollout_id`` the one to resume from.  The last act of a save."""
        self._published.add(rollout_id)
        self._on_all("publish_checkpoint", rollout_id, what=f"publishing checkpoint {rollout_id}")

    # Weights

    @property
    def restarts_engines(self) -> bool:
        """True when engines may start while a rollout runs, and wait for weights of this trainer."""
        return bool(self.args.use_fault_tolerance and self.world_size and not self.args.debug_train_only)

    def update_weights(self) -> dict[str, float]:
        """Give the present weights to every engine that takes updates; return the metrics of the push.

        With fault tolerance dead engines are replaced first.  ``--weight-push-failure`` says what becomes of engines
        that do not take the push.
        """
        if self.args.debug_train_only or not self.world_size:
            return {}
        if self.restarts_engines:
            # An engine that starts or takes weights answers no probe; the next rollout resumes the monitors.
            self._ask_manager("health_monitoring_pause")
            self._recover_engines()
        metrics = self._push_until_taken()
        if self._report_refusals() and self.restarts_engines:
            # Where GPUs are shared, others must be up before the trainer takes them; elsewhere that can wait.
            self._recover_engines()
            self.serve_new_engines()
        return metrics

    def _push_until_taken(self) -> dict[str, float]:
        """Push; where no engine took it, again to others in their place.  A failure of the trainer's stays one."""
        num_failed = 0
        while True:
            try:
                return self.push_once()
            except HangError:
                raise  # the trainer's, which is started again
            except (ProcessError, WeightSyncError) as error:
                num_failed += 1
                if not self.restarts_engines or num_failed == MAX_PUSHES:
                    raise
                was_refused = self._report_refusals()
                if not self._ask_manager("find_dead_engines", 0.0 if was_refused else 10.0) and not was_refused:
                    raise
                logger.warning("no engine took the push; retrying: %s", error)
            self._recover_engines()

    def serve_new_engines(self) -> None:
        """Give the weights to engines in the place of dead ones; to be called while the trainer is idle."""
        engines = self._ask_manager("get_engines_without_weights")
        if not engines.engines:
            return
        try:
            self.resend_weights(engines)
            self._failed_resends = 0
        except HangError:
            raise
        except (ProcessError, WeightSyncError) as error:
            # It may have died as well: then its monitor reports it, and we are called again.
            self._failed_resends += 1
            if self._failed_resends >= MAX_FAILED_RESENDS:
                raise
            logger.warning("new engines did not take the weights; they will be tried again: %s", error)
        self._report_refusals()

    def _report_refusals(self) -> bool:
        """Tell the manager which engines the last push excluded; return whether there were any.

        Raises:
            WeightSyncError: ``--weight-push-failure`` is stop.
        """
        excluded, self.excluded = self.excluded, []
        if excluded:
            self._ask_manager("push_refused", excluded)
        return bool(excluded)

    def _recover_engines(self) -> None:
        """Restart dead engines, and wait for those that the push must meet."""
        self._ask_manager("recover_updatable_engines", timeout_s=memory_timeout_s(self.args))

    def push_once(self) -> dict[str, float]:
        """Push the present weights once; :attr:`excluded` has the engines that did not take them."""
        self.excluded = []
        engines = self._ask_manager("push_started")
        if not engines.engines:
            return {}
        metrics = self._push("update_weights", engines)
        self._report_taken()
        return metrics

    def resend_weights(self, engines: UpdatableEngines) -> None:
        """Give engines that started late what the others got with the last push, under the same version."""
        self._push("resend_weights", engines)
        self._report_taken()

    def _connect(self, engines: UpdatableEngines) -> None:
        # Ranks that were started again know none of them, whatever the manager told those before.
        all_new = replace(engines, num_new=len(engines.engines))
        self._is_connected = False  # where it fails some ranks know these engines, and others those before
        self._on_all("connect_engines", all_new, what="the trainers' connection to the engines")
        self._is_connected = True
        self._ask_manager("clear_updatable_num_new_engines")

    def _push(self, verb: str, engines: UpdatableEngines) -> dict[str, float]:
        """Push once, by a verb of the trainer's; :attr:`excluded` has the engines that did not take the weights.

        The trainers keep the deadline of the push themselves, and know who was late.
        """
        if verb == "resend_weights" or engines.num_new or not self._is_connected:
            self._connect(engines)
        self._version.count(self.args.save)
        try:
            results = self._on_all(verb, what="the push", timeout_s=self.args.weight_update_timeout_s + PUSH_MARGIN_S)
        except WeightSyncError:
            self.excluded = self._ask_excluded()
            raise
        self.excluded = self._ask_excluded()
        return next((result for result in results if result), {})

    def _report_taken(self) -> None:
        """Report the engines that took a push; a new one that a router does not take in waits for the next rollout."""
        try:
            self._ask_manager("push_done", self.excluded)
        except ProcessError as error:
            if not self.restarts_engines:
                raise
            logger.warning("a new engine waits for its router: %s", error)

    def _ask_excluded(self) -> list[ExcludedEngine]:
        asked = [self.actors[0].excluded_engines.remote()]
        return self._wait(asked, "the engines that the push excluded", PUSH_MARGIN_S)[0]

    def _ask_manager(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        ref: ray.ObjectRef = getattr(self._manager, method).remote(*arguments)
        what = f"the rollout manager ({method})"
        return wait_for(ref, what=what, timeout_s=timeout_s or self.args.weight_update_timeout_s)

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
        if self._heartbeats is not None:
            self._heartbeats.begin()
        return wait_for(
            refs,
            what=f"{what} ({self.role})",
            timeout_s=timeout_s or self.args.train_timeout_s,
            meanwhile=self._heartbeats.check if self._heartbeats is not None else None,
            meanwhile_every_s=HEARTBEAT_EVERY_S,
        )
