"""The interface of a training backend: one rank of a trainer and its verbs.

``slime.ray`` uses only this class of a training backend.  A backend subclasses it without importing Ray; ``slime.ray``
wraps the subclass in an actor.
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

    Invariant: every verb below is called on all ranks of the group, with the same arguments and in the same order,
    because any of them may contain collectives.  Only ``train`` gets different data on each rank.
    """

    args: Namespace
    role: str
    rank: int
    world_size: int

    def set_rendezvous(
        self, world_size: int, rank: int, master_addr: str, master_port: int, local_rank: int = 0
    ) -> None:
        """Set the rendezvous of the group.  Must be called first.

        Args:
            world_size: number of ranks in the group.
            rank: this rank.
            master_addr: address of rank 0.
            master_port: a free port at that address.
            local_rank: index of this rank's accelerator among those visible to the process.
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

    def join_process_group(self, cuda_backend: str, timeout: timedelta) -> None:
        """Select the accelerator, and create the default process group and a second, gloo group of all ranks.

        Without CUDA the backend is gloo, not ``cuda_backend``.

        Raises:
            ProcessError: ``set_rendezvous`` was not called.
        """
        if not hasattr(self, "rank"):
            raise ProcessError("This trainer has no rendezvous yet; call set_rendezvous() before init().")
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(self.local_rank)
            backend = cuda_backend
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
            args: complete flags.
            role: ``"actor"`` or ``"critic"``.
            with_ref: keep a frozen reference policy besides the actor.
            transforms: the backend's classes that change the model after it is built.
            transport: the backend's factory of weight transports; None for the plain push.
            guides: the backend's classes of training targets besides the rewards.

        Returns:
            The rollout to start with: ``--start-rollout-id`` if given, otherwise one past the loaded checkpoint.
        """

    @abstractmethod
    def train(
        self, rollout_id: int, rank_batch: RankBatch, external_data: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """Take the optimizer steps of one rollout on this rank's share of its data.

        Args:
            rollout_id: the rollout that generated the data.
            rank_batch: this data-parallel rank's entry of ``slime.train_data.split.split_by_rank``.
            external_data: what another role computed for the same samples (a critic's ``values``).

        Returns:
            The actor's metrics on its main rank, the critic's ``values`` on its last pipeline stage, None elsewhere.
        """

    @abstractmethod
    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Write a checkpoint of model and optimizer after ``rollout_id``.

        A resumed run does not load it until :meth:`publish_checkpoint`.

        Args:
            force_sync: write before returning, even with ``--async-save``.
        """

    @abstractmethod
    def publish_checkpoint(self, rollout_id: int) -> None:
        """Make the checkpoint of ``rollout_id`` the one that a resumed run loads."""

    @abstractmethod
    def connect_rollout_engines(self, engines: Sequence[EngineProxy], num_new_engines: int) -> None:
        """Set the engines to push weights to; ``num_new_engines`` of them were not connected before."""

    @abstractmethod
    def update_weights(self) -> dict[str, float] | None:
        """Push the actor's weights to every connected engine.

        Engines that fail to load them are excluded, see :meth:`excluded_engines`; all others have exactly these
        weights.

        Returns:
            metrics of the push on the main rank, except before the first rollout.

        Raises:
            WeightSyncError: no engine loaded them.
        """

    def resend_weights(self) -> None:
        """Push the weights of the last push, under the same version, to the engines connected now, which started late.

        Raises:
            WeightSyncError: as ``update_weights``; always in a trainer without such a push.
        """
        raise WeightSyncError(
            f"{type(self).__name__} cannot push to engines that start late; run without --use-fault-tolerance"
        )

    def write_weights(self) -> Any:
        """Write the actor's weights where engines can read them; the caller notifies the engines.

        Returns:
            on rank 0, what the caller needs to notify them.

        Raises:
            WeightSyncError: they cannot be written; always in a trainer that cannot write weights.
        """
        raise WeightSyncError(f"{type(self).__name__} cannot write weights for engines; run without --release-train")

    def excluded_engines(self) -> list[ExcludedEngine]:
        """Return the engines that the last push excluded, even if it raised; they are paused and serve nothing."""
        return []

    @abstractmethod
    def sleep(self) -> None:
        """Free the accelerator's memory until ``wake_up``."""

    @abstractmethod
    def wake_up(self) -> None:
        """Allocate the memory again and restore its content."""

    @abstractmethod
    def clear_memory(self) -> None:
        """Free cached memory; the model stays."""

    @abstractmethod
    def get_parallel_config(self) -> dict[str, int]:
        """Return ``dp_size, cp_size, vpp_size, microbatch_group_size_per_vp_stage`` of the group; and of this rank
        ``dp_rank``, ``cp_rank`` and ``is_last_stage`` (of the pipeline, 0 or 1).

        ``dp_size`` and ``dp_rank`` do not count context parallelism: ranks with the same ``dp_rank`` train on the same
        samples.
        """
