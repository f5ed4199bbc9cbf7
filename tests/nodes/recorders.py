"""A trainer rank and an engine that go as far as a machine without GPUs can, and report how far that was."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import ray
import torch.distributed as dist

from slime.backends.sglang_utils import sglang_engine
from slime.backends.train_worker import TrainWorker
from slime.ray.engines.actor import EngineActor
from slime.ray.waiting import WATCH_GROUP

# Ray's workers get these classes as code, because the tests are not installed.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def _touches_a_gpu(self: Any, *arguments: Any, **keywords: Any) -> Any:
    raise NotImplementedError("a recorder stops before this")


_VERBS = dict.fromkeys(TrainWorker.__abstractmethods__, _touches_a_gpu)


class RecordingTrainer(type("_AllVerbs", (TrainWorker,), _VERBS)):  # type: ignore[misc]
    """Joins the training group over gloo, as the Megatron trainer's ``init`` does first, and stops there."""

    def init(
        self,
        args: Namespace,
        role: str,
        with_ref: bool = False,
        transforms: tuple[type, ...] = (),
        transport: Any = None,
        guides: tuple[type, ...] = (),
    ) -> int:
        """Create the group of all ranks, and tell the others where this rank is."""
        self.args, self.role = args, role
        self.join_process_group("nccl", timedelta(minutes=args.distributed_timeout_minutes))
        mine = (self.rank, ray.util.get_node_ip_address(), self.local_rank)
        self.places: list[Any] = [None] * self.world_size
        dist.all_gather_object(self.places, mine)
        return 0

    def where_all_are(self) -> list[tuple[int, str, int]]:
        """(rank, node, GPU) of every rank, as gathered over the training group."""
        return self.places

    def variables(self, names: Sequence[str]) -> dict[str, str | None]:
        """These variables of this process."""
        return {name: os.environ.get(name) for name in names}

    def wait_for_ever(self) -> None:
        """Like a collective with a dead rank."""
        time.sleep(3600)


class _RecordingEngine(EngineActor):
    """Builds the server's whole command without starting it."""

    def start_server(self, **addresses: Any) -> None:
        """Keep the arguments; start no process."""
        self.noted: dict[str, Any] = {}

        def note(server_args: dict[str, Any], **_: Any) -> None:
            self.noted = dict(server_args)

        sglang_engine.start_server = note  # type: ignore[assignment]  # in this actor's process only
        super().start_server(**addresses)

    def wait_ready(self, timeout_s: float, *, register: bool = True) -> None:
        """There is nothing to wait for."""

    def describe(self) -> dict[str, Any]:
        """Where this actor is, and the server's arguments."""
        return {"node": ray.util.get_node_ip_address(), "gpu": self.base_gpu_id, **self.noted}

    def variables(self, names: Sequence[str]) -> dict[str, str | None]:
        """These variables of this process."""
        return {name: os.environ.get(name) for name in names}


RecordingEngine = ray.remote(concurrency_groups={WATCH_GROUP: 1})(_RecordingEngine)
