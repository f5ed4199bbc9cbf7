"""Push to engines on the trainer's own GPUs: tensors are shared, not sent.

Each trainer rank puts the bucket into a flat buffer on its GPU (in shared memory on a machine without one); the
handles of the ranks that share an engine are gathered on the first of them, which hands them to the engine, one for
each of its GPUs.  Engines outside the trainer's range get every bucket by broadcast as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils import memory, sglang
from slime.backends.megatron_utils.update_weight.sender import PushReport, WeightSender, wait_all
from slime.backends.megatron_utils.update_weight.update_group import UpdateGroup
from slime.utils.errors import ConfigError
from slime.weights.named_tensors import NamedTensors
from slime.weights.receiver import WeightReceiver


class UpdateWeightFromTensor(WeightSender):
    """Colocated engines through handles, the others through one process group."""

    across_stages = True

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._engine: WeightReceiver | None = None
        self._engine_group: dist.ProcessGroup | None = None
        self._buffer: torch.Tensor | None = None
        self._remote = UpdateGroup("slime", self.timeout_s)

    def connect(self, receivers: Sequence[WeightReceiver]) -> None:
        """Find the engine that shares this rank's GPU; rank 0 joins a group with those that share none."""
        sglang.prepare()
        world_size, rank = dist.get_world_size(), dist.get_rank()
        self._engine, self._engine_group = None, None
        remote = []
        for receiver in receivers:
            end = receiver.gpu_offset + receiver.num_gpus
            if not (receiver.is_colocated and end <= world_size):
                remote.append(receiver)
                continue
            ranks = list(range(receiver.gpu_offset, end))
            group = dist.new_group(ranks, backend="gloo")  # every rank takes part in making every group
            if rank not in ranks:
                continue
            if self._engine is not None:
                raise ConfigError(
                    f"engines {self._engine.index} and {receiver.index} both claim the GPU of trainer rank {rank}; "
                    "check --rollout-num-gpus-per-engine and --sglang-config"
                )
            self._engine, self._engine_group = receiver, group
        self.on_main_rank("connecting to the engines outside the trainer's GPUs", lambda: self._remote.connect(remote))

    def update_weights(self) -> PushReport:
        """As the base class, with allocations outside the memory saver: its regions cannot be shared."""
        with memory.memory_saver_disabled():
            return super().update_weights()

    def offer(self, bucket: NamedTensors, version: str, *, compare: bool) -> Callable[[], None] | None:
        """Gather the handles of the ranks that share this rank's engine."""
        handles: list[str] | None = None
        if self._engine is not None:
            is_first = dist.get_rank() == self._engine.gpu_offset
            handles = [""] * self._engine.num_gpus if is_first else None
            if compare:
                handle = sglang.serialize_by_value(bucket)
            else:
                handle, self._buffer = sglang.serialize_bucket(bucket)
            dist.gather_object(handle, handles, dst=self._engine.gpu_offset, group=self._engine_group)
        sends_remotely = dist.get_rank() == 0 and bool(self._remote.receivers)
        if handles is None and not sends_remotely:
            return None

        def deliver() -> None:
            if handles is not None:
                self._hand_over(handles, version, compare=compare)
            if sends_remotely:
                self._remote.compare(bucket, version) if compare else self._remote.broadcast(bucket, version)

        return deliver

    def _hand_over(self, handles: list[str], version: str, *, compare: bool) -> None:
        assert self._engine is not None
        load_format = sglang.COMPARE_LOADER if compare else sglang.FLATTENED_BUCKET
        request = self._engine.update_weights_from_tensor(
            serialized_named_tensors=handles, load_format=load_format, weight_version=version, flush_cache=False
        )
        wait_all([request], self.timeout_s)

    def settle(self) -> None:
        """Keep the buffer until the engine has loaded it."""
        if self._engine_group is not None:
            dist.barrier(group=self._engine_group)
        self._buffer = None
        memory.collect_shared_memory()
