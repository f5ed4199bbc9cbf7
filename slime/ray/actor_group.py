"""All ranks of one trainer (actor or critic), driven as one: each call goes to every rank."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from slime.flags.checkpoint import TRACKER, VersionCount, read_tracker, version_before
from slime.flags.parse import args_to_resume
from slime.observability.telemetry import FLUSH_TIMEOUT_S
from slime.ray.gpus import GpuSlice
from slime.ray.parts import CORE, Parts
from slime.ray.push import WeightPush
from slime.ray.train_actor import Heartbeats, TrainRayActor, start_ranks, trainer_environment
from slime.ray.utils import ray_transport
from slime.ray.waiting import forget, wait_for
from slime.utils.errors import CheckpointError, ProcessError
from slime.utils.misc import Box

if TYPE_CHECKING:
    from slime.backends.train_worker import TrainWorker

logger = logging.getLogger(__name__)

HEARTBEAT_EVERY_S = 2.0
"""How often the driver polls the progress of the ranks it is waiting for."""


class JobCheckpoints:
    """The checkpoints that this job has published in one folder.

    Args:
        save: the ``--save`` folder, or None.
    """

    def __init__(self, save: str | None) -> None:
        self._tracker = Path(save or "") / TRACKER
        self._published: set[int] = set()
        self._left_out: set[int] = set()

    def publish(self, rollout_id: int) -> None:
        """Record that the checkpoint of ``rollout_id`` may be resumed from."""
        self._published.add(rollout_id)

    def leave_out(self, number: int) -> None:
        """Exclude the ``number`` newest checkpoints from resuming."""
        self._left_out.update(sorted(self._written(), reverse=True)[:number])

    @property
    def last(self) -> int | None:
        """Rollout id of the newest fully written checkpoint, or None."""
        return max(self._written(), default=None)

    def _written(self) -> set[int]:
        newest = read_tracker(self._tracker, "--save") if self._tracker.is_file() else None
        if not isinstance(newest, int) or newest not in self._published:
            return set()
        return {rollout_id for rollout_id in self._published - self._left_out if rollout_id <= newest}


class RayTrainGroup:
    """One trainer: ``num_nodes x num_gpus_per_node`` ranks, rank r on the r-th GPU of the placement.

    Args:
        args: the run's arguments (those of the role, if roles differ).
        num_nodes: number of nodes; with 0 there is no trainer, and every method does nothing.
        num_gpus_per_node: ranks per node.
        pg: the GPUs, at least one per rank.
        num_gpus_per_actor: fraction of a GPU bundle that one rank reserves.
        role: "actor" or "critic".
        with_ref: whether to load the reference model.
        actor_cls: the worker class, or its ``module:name``, which the ranks import; None for :attr:`worker`.
        parts: the run's implementations.
        leader: for a critic, the actor's group, whose checkpoints decide where the critic resumes.
    """

    rank_class: type[TrainRayActor] = TrainRayActor
    """The Ray actor class that wraps the worker."""
    worker = "slime.backends.megatron_utils.actor:MegatronTrainRayActor"
    """The default worker class."""
    leaves_between_steps = False
    """True if the ranks exit after each step; during a push the engines then take the freed GPU memory."""

    def __init__(
        self,
        args: Namespace,
        num_nodes: int,
        num_gpus_per_node: int,
        pg: GpuSlice,
        num_gpus_per_actor: float = 0.4,
        role: str = "actor",
        with_ref: bool = False,
        actor_cls: type[TrainWorker] | str | None = None,
        parts: Parts = CORE,
        leader: RayTrainGroup | None = None,
    ) -> None:
        self.args = self._run_args = args
        self.role = role
        self.with_ref = with_ref
        self.world_size = num_nodes * num_gpus_per_node
        self.names = [f"{role} rank {rank}" for rank in range(self.world_size)]
        """Rank names for messages."""
        self.gpus, self._num_gpus_per_actor, self._worker = pg, num_gpus_per_actor, actor_cls or self.worker
        self.parts = parts
        self.checkpoints: JobCheckpoints = JobCheckpoints(args.save) if leader is None else leader.checkpoints
        self.push = WeightPush(self)
        self.layouts: list[dict[str, int]] = []
        """For each rank, its parallel group sizes and its position in them (``TrainWorker.get_parallel_config``)."""
        self.deal_external_data: Callable[[list[Any]], list[Any]] = list
        """Maps another role's list, one entry per rank of that role, to a list with one entry per rank here."""
        self.actors: list[Any] = []
        self._heartbeats: Heartbeats | None = None
        self.start_rollout_id: int = 0
        self._was_created = False
        self.version = VersionCount()

    # Life

    def create(self) -> int:
        """Start every rank, load the model, and return the id of the first rollout to run (equal on all ranks).

        Later calls resume from this job's last checkpoint; without one, the ranks start as in the first call.
        """
        self.begin()
        asked = self.actors[0].get_master_addr_and_port.remote()
        address, port = wait_for(asked, what=f"the first {self.role} rank to start", timeout_s=600)
        places = enumerate(zip(self.actors, self.gpus.gpu_ids, strict=False))
        met = [actor.set_rendezvous.remote(self.world_size, rank, address, port, gpu) for rank, (actor, gpu) in places]
        self.wait(met, "rendezvous")
        # Heartbeats start here because every rank has answered once.
        self._heartbeats = Heartbeats(
            dict(zip(self.names, self.actors, strict=True)), self.args.trainer_hang_timeout_s
        )
        if self._was_created:
            self.args = self.args_to_resume()
        start_ids = self.on_all("init", self.args, self.role, self.with_ref, what="model set-up")
        if len(set(start_ids)) != 1:
            raise CheckpointError(f"{self.role} ranks resumed from different saves, at rollouts {start_ids}")
        self.start_rollout_id = start_ids[0]
        folders, at_least = (self.args.load, self.args.save), self.args.update_weight_start_version
        number = version_before(self.start_rollout_id, folders, at_least=at_least)
        self.version.start(number, self.start_rollout_id)
        self._was_created, self.push.is_connected = True, False
        if not self.layouts:
            self.layouts = self.on_all("get_parallel_config", what="the trainer's layout", timeout_s=120)
        return self.start_rollout_id

    def args_to_resume(self) -> Namespace:
        """Return the args with which restarted ranks resume."""
        return args_to_resume(self._run_args, weight_version=self.version.number, checkpoint=self.checkpoints.last)

    def leave_out_checkpoints(self, number: int) -> None:
        """Exclude the ``number`` newest checkpoints, so that the next start resumes from an older one."""
        self.checkpoints.leave_out(number)

    def begin(self) -> None:
        """Start the rank processes, whose imports take many seconds; :meth:`create` then uses them."""
        if self.world_size and not self.actors:
            self.actors = start_ranks(
                self._worker,
                self.gpus,
                self.names,
                trainer_environment(self.args, self.world_size),
                takes_tensors=ray_transport(self.args.rollout_data_transport) is not None,
                gpu_share=self._num_gpus_per_actor,
                parts=self.parts,
                rank_class=self.rank_class,
            )

    def set_rollout_manager(self, rollout_manager: Any) -> None:
        """Send the manager the trainer's parallel layout, which it needs to split the train data."""
        self.push.manager = rollout_manager
        told = rollout_manager.set_train_parallel_config.remote(self.layouts[0])
        wait_for(told, what="the rollout manager", timeout_s=120)

    def release(self, *, flushes: bool = False) -> None:
        """Kill every rank.  Ray frees their resources some seconds later, when the processes have exited.

        Args:
            flushes: whether each rank writes its telemetry first; a rank that fails to is killed all the same.
        """
        if flushes:
            try:
                self.on_all("flush_telemetry", what="the trainer's record", timeout_s=2 * FLUSH_TIMEOUT_S)
            except ProcessError as error:
                logger.warning("The record of the last rollout may be missing data from the %s: %s", self.role, error)
        for actor, name in zip(self.actors, self.names, strict=False):  # a death during start-up leaves fewer actors
            forget(name)
            ray.kill(actor)
        self.actors, self._heartbeats = [], None

    # Work

    def async_train(self, rollout_id: int, rollout_data: list[Box], external_data: Any = None) -> list[ray.ObjectRef]:
        """Start training on one rollout on every rank; return one reference per rank.

        A list in ``external_data`` holds one value (or reference) per critic rank, and each rank gets its own entry
        (:attr:`deal_external_data`).  Any other value goes to all ranks.
        """
        is_list = isinstance(external_data, list)
        per_rank = self.deal_external_data(external_data) if is_list else [external_data] * len(self.actors)
        return [
            actor.train_boxed.remote(rollout_id, rollout_data, external_data=data)
            for actor, data in zip(self.actors, per_rank, strict=True)
        ]

    def wait_trained(self, rollout_id: int, refs: list[ray.ObjectRef]) -> list[Any]:
        """Wait for the calls that ``async_train`` started; return each rank's result."""
        results = self.wait(refs, what=f"training on rollout {rollout_id}")
        self.version.rollout_id = rollout_id
        return results

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Write the checkpoint of ``rollout_id`` and the data position, then publish the checkpoint.

        A driver that saves several roles together calls :meth:`write_checkpoint` for each role, then
        :meth:`publish_checkpoint` for each.
        """
        self.write_checkpoint(rollout_id, force_sync)
        has_manager = self.push.manager is not None
        if has_manager and self.args.rollout_global_dataset:
            # Before publishing: every published checkpoint has a data position.
            self.push.ask_manager("save", rollout_id, timeout_s=self.args.train_timeout_s)
        self.publish_checkpoint(rollout_id)
        if has_manager:
            self.push.ask_manager("record_published", rollout_id)

    def write_checkpoint(self, rollout_id: int, force_sync: bool = False) -> None:
        """Write the checkpoint of ``rollout_id``.  No run resumes from it until :meth:`publish_checkpoint`."""
        self.on_all("save_model", rollout_id, force_sync, what=f"checkpoint {rollout_id}")

    def publish_checkpoint(self, rollout_id: int) -> None:
        """Make the checkpoint of ``rollout_id`` the one to resume from.  The last step of a save."""
        self.checkpoints.publish(rollout_id)
        self.on_all("publish_checkpoint", rollout_id, what=f"publishing checkpoint {rollout_id}")

    # Weights and memory

    def update_weights(self) -> dict[str, float]:
        """Push the current weights to the engines; see :meth:`WeightPush.update`."""
        return self.push.update()

    def onload(self) -> None:
        """Load the trainer's state back onto the GPUs."""
        self.on_all("wake_up", what="trainer wake-up")

    def offload(self) -> None:
        """Offload the trainer's state from the GPUs."""
        self.on_all("sleep", what="trainer sleep")

    def clear_memory(self) -> None:
        """Return cached, unused GPU memory to the driver."""
        self.on_all("clear_memory", what="freeing cached memory")

    def on_all(self, verb: str, *arguments: Any, what: str, timeout_s: float | None = None) -> list[Any]:
        """Call method ``verb`` on every rank; return each rank's result."""
        return self.wait([getattr(actor, verb).remote(*arguments) for actor in self.actors], what, timeout_s)

    def wait(self, refs: list[ray.ObjectRef], what: str, timeout_s: float | None = None) -> list[Any]:
        """Wait for calls to ranks; raises HangError if a rank hangs meanwhile."""
        if self._heartbeats is not None:
            self._heartbeats.begin()
        return wait_for(
            refs,
            what=f"{what} ({self.role})",
            timeout_s=timeout_s or self.args.train_timeout_s,
            meanwhile=self._heartbeats.check if self._heartbeats is not None else None,
            meanwhile_every_s=HEARTBEAT_EVERY_S,
        )
