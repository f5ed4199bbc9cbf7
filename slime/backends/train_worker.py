"""The trainer as the rest of slime sees it: one rank and its verbs.

``slime.ray`` knows this class and nothing else of a training backend.  A backend subclasses it and imports no Ray;
``slime.ray`` wraps the subclass as an actor.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slime.utils import distributed_utils, env
from slime.utils.errors import ProcessError, WeightSyncError

if TYPE_CHECKING:
    from slime.train_data.columns import RankBatch
    from slime.weights.push.engine import EngineProxy
    from slime.weights.push.participants import ExcludedEngine

logger = logging.getLogger(__name__)


class TrainWorker(ABC):
    """One rank of a training group.

    Invariant: every verb below is called on all ranks of the group, with the same arguments and in the same order
    (``train`` gets each rank's own data), because each of them may contain collectives.
    """

    args: Namespace
    role: str
    rank: int
    world_size: int

    def set_rendezvous(
        self, world_size: int, rank: int, master_addr: str, master_port: int, local_rank: int = 0
    ) -> None:
        """Set the rendezvous of the group; the first call of all.

        Args:
            world_size: ranks in the group.
            rank: this one.
            master_addr: address of rank 0.
            master_port: a free port there.
            local_rank: index of this rank's accelerator among those the process can see.
        """
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self._rendezvous = master_addr, master_port
        env.export(
            {
                "MASTER_ADDR": master_addr,
                "MASTER_PORT": str(master_port),
                "WORLD_SIZE": str(world_size),
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
            }
        )

    def join_process_group(self, args: Namespace) -> None:
        """Enter the training group: accelerator, default process group, and a gloo group of all ranks beside it.

        On a machine without CUDA the backend is gloo whatever ``--distributed-backend`` says.

        Raises:
            ProcessError: ``set_rendezvous`` was not called.
        """
        if not hasattr(self, "rank"):
            raise ProcessError("This trainer has no rendezvous yet; call set_rendezvous() before init().")
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(self.local_rank)
            backend = args.distributed_backend
        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        store = distributed_utils.open_store(
            *self._rendezvous, rank=self.rank, world_size=self.world_size, timeout=timeout
        )
        dist.init_process_group(
            backend=backend, store=store, world_size=self.world_size, rank=self.rank, timeout=timeout
        )
        distributed_utils.init_gloo_group(timeout=timeout)
        logger.info("Rank %d of %d joined the training group over %s.", self.rank, self.world_size, backend)

    @abstractmethod
    def init(
        self,
        args: Namespace,
        role: str,
        with_ref: bool = False,
        transforms: tuple[type, ...] = (),
        transport: Callable[..., Any] | None = None,
        guides: tuple[type, ...] = (),
    ) -> int:
        """Build and load the model.

        Args:
            args: everything the user asked for.
            role: ``"actor"`` or ``"critic"``.
            with_ref: keep a frozen reference policy beside the actor.
            transforms: of the model after it is built, as the backend has them.
            transport: makes the way of weights to the engines, as the backend has it; the plain one when None.
            guides: what the policy is trained towards beside the rewards, as the backend has them.

        Returns:
            The rollout to start with: one past the checkpoint that was loaded.
        """

    @abstractmethod
    def train(
        self, rollout_id: int, rank_batch: RankBatch, external_data: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """Take the optimizer steps of one rollout on this rank's share of its data.

        Args:
            rollout_id: the rollout that made the data.
            rank_batch: this data-parallel rank's entry of ``slime.train_data.split.split_by_rank``.
            external_data: what another role computed for the same samples (a critic's ``values``).

        Returns:
            Metrics on the main rank, a critic's ``values`` on the last pipeline stage of a critic, None elsewhere.
        """

    @abstractmethod
    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Write model and optimizer of ``rollout_id``; the checkpoint counts only once it is published."""

    @abstractmethod
    def publish_checkpoint(self, rollout_id: int) -> None:
        """Make the checkpoint of ``rollout_id`` the one that a resumed run loads."""

    @abstractmethod
    def connect_rollout_engines(self, engines: Sequence[EngineProxy], num_new_engines: int) -> None:
        """Set the engines that get weights; ``num_new_engines`` of them have not been seen before."""

    @abstractmethod
    def update_weights(self) -> dict[str, float] | None:
        """Push the actor's weights to every connected engine.

        Engines that do not take them are left out, see :meth:`excluded_engines`; the others hold just these weights.

        Returns:
            metrics of the push on the main rank, except before the first rollout.

        Raises:
            WeightSyncError: no engine took them.
        """

    def resend_weights(self) -> None:
        """Push what the last push sent, under the same version, to the engines connected now: they started late.

        Raises:
            WeightSyncError: as ``update_weights``; always, where a trainer has no such push.
        """
        raise WeightSyncError(
            f"{type(self).__name__} cannot push to engines that start late; run without --use-fault-tolerance"
        )

    def write_weights(self) -> Any:
        """Write the actor's weights where engines can read them; the caller notifies the engines.

        Returns:
            what that takes, on the main rank.

        Raises:
            WeightSyncError: they cannot be written; always, where a trainer writes none.
        """
        raise WeightSyncError(f"{type(self).__name__} cannot write weights for engines; run without --release-train")

    def excluded_engines(self) -> list[ExcludedEngine]:
        """Return the engines that the last push excluded, also when it raised; they are paused and serve nothing."""
        return []

    @abstractmethod
    def sleep(self) -> None:
        """Free the accelerator's memory until ``wake_up``."""

    @abstractmethod
    def wake_up(self) -> None:
        """Take the memory again and restore its content."""

    @abstractmethod
    def clear_memory(self) -> None:
        """Free what caches hold; the model stays."""

    @abstractmethod
    def get_parallel_config(self) -> dict[str, int]:
        """Return ``dp_size, cp_size, vpp_size, microbatch_group_size_per_vp_stage`` of the group; ``dp_rank``,
        ``cp_rank`` and ``is_last_stage`` (of the pipeline; 0 or 1) of this rank.

        ``dp_size`` and ``dp_rank`` leave context parallelism out: ranks with the same ``dp_rank`` train on the same
        samples.
        """
