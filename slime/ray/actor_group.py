"""All ranks of one trainer (actor or critic), driven as one: a verb goes to every rank."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from slime.flags.checkpoint import TRACKER, VersionCount, read_tracker
from slime.flags.parse import args_to_resume
from slime.observability.telemetry import FLUSH_TIMEOUT_S
from slime.ray.gpus import GpuSlice
from slime.ray.parts import CORE, Parts
from slime.ray.push import WeightPush
from slime.ray.train_actor import Heartbeats, TrainRayActor, start_ranks
from slime.ray.waiting import forget, wait_for
from slime.utils.errors import CheckpointError, ProcessError
from slime.utils.misc import Box

if TYPE_CHECKING:
    from slime.backends.train_worker import TrainWorker

logger = logging.getLogger(__name__)

HEARTBEAT_EVERY_S = 2.0
"""How often the driver asks the ranks that it waits for how far they are."""


class JobCheckpoints:
    """The checkpoints of this job in one folder.

    Args:
        save: the folder of ``--save``; None without one.
    """

    def __init__(self, save: str | None) -> None:
        self._tracker = Path(save or "") / TRACKER
        self._published: set[int] = set()
        self._left_out: set[int] = set()

    def publish(self, rollout_id: int) -> None:
        """Note that the checkpoint of ``rollout_id`` is to count."""
        self._published.add(rollout_id)

    def leave_out(self, number: int) -> None:
        """Let so many of the newest ones no longer count."""
        self._left_out.update(sorted(self._written(), reverse=True)[:number])

    @property
    def last(self) -> int | None:
        """The rollout of the newest one; with ``--async-save`` only one that is written."""
        return max(self._written(), default=None)

    def _written(self) -> set[int]:
        newest = read_tracker(self._tracker, "--save") if self._tracker.is_file() else None
        if not isinstance(newest, int) or newest not in self._published:
            return set()
        return {rollout_id for rollout_id in self._published - self._left_out if rollout_id <= newest}


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
        actor_cls: the worker class, or its ``module:name``, which the ranks import; the Megatron trainer when None.
        parts: of the run.
        leader: the actor from whose checkpoints a critic resumes.
    """

    rank_class: type[TrainRayActor] = TrainRayActor
    """Gives a worker its verbs as a Ray actor."""
    worker = "slime.backends.megatron_utils.actor:MegatronTrainRayActor"
    """The worker of a rank unless another is given."""
    leaves_between_steps = False
    """The ranks end after each step, and a push has the engines take the memory that they leave."""

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
        """The names of the ranks in messages."""
        self.gpus, self._num_gpus_per_actor, self._worker = pg, num_gpus_per_actor, actor_cls or self.worker
        self.parts = parts
        self.checkpoints: JobCheckpoints = JobCheckpoints(args.save) if leader is None else leader.checkpoints
        self.push = WeightPush(self)
        self.layouts: list[dict[str, int]] = []
        """Of every rank, parallel group sizes and its place in them (``TrainWorker.get_parallel_config``)."""
        self.deal_external_data: Callable[[list[Any]], list[Any]] = list
        """From a list of another role's, one entry for each of its ranks, to one for each rank here."""
        self.actors: list[Any] = []
        self._heartbeats: Heartbeats | None = None
        self.start_rollout_id: int = 0
        self._was_created = False
        self.version = VersionCount()

    # Life

    def create(self) -> int:
        """Start every rank, load the model, and return the first rollout to run (equal on all ranks).

        After the first time the ranks resume from the last checkpoint of this job; without one they start as they did
        first.
        """
        self.begin()
        asked = self.actors[0].get_master_addr_and_port.remote()
        address, port = wait_for(asked, what=f"the first {self.role} rank to start", timeout_s=600)
        places = enumerate(zip(self.actors, self.gpus.gpu_ids, strict=False))
        met = [actor.set_rendezvous.remote(self.world_size, rank, address, port, gpu) for rank, (actor, gpu) in places]
        self.wait(met, "rendezvous")
        # From here on every rank has answered once.
        self._heartbeats = Heartbeats(
            dict(zip(self.names, self.actors, strict=True)), self.args.trainer_hang_timeout_s
        )
        if self._was_created:
            self.args = self.args_to_resume()
        start_ids = self.on_all("init", self.args, self.role, self.with_ref, what="model set-up")
        if len(set(start_ids)) != 1:
            raise CheckpointError(f"{self.role} ranks resumed at different rollouts, of different saves: {start_ids}")
        self.start_rollout_id = start_ids[0]
        self.version.start(self.args, self.start_rollout_id)
        self._was_created, self.push.is_connected = True, False
        if not self.layouts:
            self.layouts = self.on_all("get_parallel_config", what="the trainer's layout", timeout_s=120)
        return self.start_rollout_id

    def args_to_resume(self) -> Namespace:
        """Return the args by which fresh ranks take the place of others."""
        return args_to_resume(self._run_args, weight_version=self.version.number, checkpoint=self.checkpoints.last)

    def leave_out_checkpoints(self, number: int) -> None:
        """Resume from an older one after the next start: so many of the newest no longer count."""
        self.checkpoints.leave_out(number)

    def begin(self) -> None:
        """Start the processes of the ranks, which import for many seconds; :meth:`create` continues with them."""
        if self.world_size and not self.actors:
            self.actors = start_ranks(
                self._worker,
                self.args,
                self.gpus,
                self.names,
                gpu_share=self._num_gpus_per_actor,
                parts=self.parts,
                rank_class=self.rank_class,
            )

    def set_rollout_manager(self, rollout_manager: Any) -> None:
        """Tell the manager how the trainer is laid out; it needs that to split the train data."""
        self.push.manager = rollout_manager
        told = rollout_manager.set_train_parallel_config.remote(self.layouts[0])
        wait_for(told, what="the rollout manager", timeout_s=120)

    def release(self, *, flushes: bool = False) -> None:
        """Kill every rank.  Ray counts their resources as free some seconds later, when the processes have gone.

        Args:
            flushes: whether each writes first what it has recorded; one that cannot ends without.
        """
        if flushes:
            try:
                self.on_all("flush_telemetry", what="the trainer's record", timeout_s=2 * FLUSH_TIMEOUT_S)
            except ProcessError as error:
                logger.warning("The record of the last rollout may lack the %s's part: %s", self.role, error)
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

    def wait_trained(self, rollout_id: int, refs: list[ray.ObjectRef]) -> list[Any]:
        """Wait for what ``async_train`` started; return what each rank returned."""
        results = self.wait(refs, what=f"training on rollout {rollout_id}")
        self.version.rollout_id = rollout_id
        return results

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Save the checkpoint of ``rollout_id``, and the position in the data with it, and make it count.

        A driver that saves several roles as one calls the parts: :meth:`write_checkpoint` of each, then
        :meth:`publish_checkpoint`.
        """
        self.write_checkpoint(rollout_id, force_sync)
        has_manager = self.push.manager is not None
        if has_manager and self.args.rollout_global_dataset:
            # A checkpoint that counts has one.
            self.push.ask_manager("save", rollout_id, timeout_s=self.args.train_timeout_s)
        self.publish_checkpoint(rollout_id)
        if has_manager:
            self.push.ask_manager("record_published", rollout_id)

    def write_checkpoint(self, rollout_id: int, force_sync: bool = False) -> None:
        """Write the checkpoint of ``rollout_id``; it does not count until :meth:`publish_checkpoint`."""
        self.on_all("save_model", rollout_id, force_sync, what=f"checkpoint {rollout_id}")

    def publish_checkpoint(self, rollout_id: int) -> None:
        """Make the checkpoint of ``rollout_id`` the one to resume from.  The last act of a save."""
        self.checkpoints.publish(rollout_id)
        self.on_all("publish_checkpoint", rollout_id, what=f"publishing checkpoint {rollout_id}")

    # Weights and memory

    def update_weights(self) -> dict[str, float]:
        """Give the present weights to the engines, as :meth:`WeightPush.update` does."""
        return self.push.update()

    def onload(self) -> None:
        """Bring the trainer's memory back to the GPUs."""
        self.on_all("wake_up", what="trainer wake-up")

    def offload(self) -> None:
        """Take the trainer's memory off the GPUs."""
        self.on_all("sleep", what="trainer sleep")

    def clear_memory(self) -> None:
        """Return cached, unused GPU memory to the driver."""
        self.on_all("clear_memory", what="freeing cached memory")

    def on_all(self, verb: str, *arguments: Any, what: str, timeout_s: float | None = None) -> list[Any]:
        """Call a verb of every rank; return what each returned."""
        return self.wait([getattr(actor, verb).remote(*arguments) for actor in self.actors], what, timeout_s)

    def wait(self, refs: list[ray.ObjectRef], what: str, timeout_s: float | None = None) -> list[Any]:
        """Wait for calls of ranks; one that hangs meanwhile ends the wait."""
        if self._heartbeats is not None:
            self._heartbeats.begin()
        return wait_for(
            refs,
            what=f"{what} ({self.role})",
            timeout_s=timeout_s or self.args.train_timeout_s,
            meanwhile=self._heartbeats.check if self._heartbeats is not None else None,
            meanwhile_every_s=HEARTBEAT_EVERY_S,
        )
