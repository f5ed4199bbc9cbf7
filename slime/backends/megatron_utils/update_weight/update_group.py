"""A process group of one trainer rank and all GPUs of some engines, for weights that are broadcast."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist

from slime.backends.megatron_utils import sglang
from slime.backends.megatron_utils.update_weight.sender import wait_all
from slime.utils import net
from slime.utils.errors import EngineError, WeightSyncError
from slime.weights.named_tensors import NamedTensors, dtype_name
from slime.weights.receiver import WeightReceiver


class UpdateGroup:
    """Rank 0 of the group is this process; the engines follow in order, one rank for each of their GPUs.

    Args:
        name: what the engines call the group.
        timeout_s: deadline of joining and of each bucket.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.receivers: list[WeightReceiver] = []
        self._group: dist.ProcessGroup | None = None

    def connect(self, receivers: Sequence[WeightReceiver]) -> None:
        """Leave the old group, if any, and form one with ``receivers``."""
        self._leave()
        self.receivers = list(receivers)
        if not self.receivers:
            return
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        address, port = net.get_current_node_ip(), net.find_available_port(20000)
        world_size = 1 + sum(receiver.num_gpus for receiver in self.receivers)
        joining, offset = [], 1
        for receiver in self.receivers:
            joining.append(receiver.init_weights_update_group(address, port, offset, world_size, self.name, backend))
            offset += receiver.num_gpus
        self._group = self._join(joining, backend, address, port, world_size)

    def _join(self, joining: list, backend: str, address: str, port: int, world_size: int) -> dist.ProcessGroup:
        """Join on a thread, so that an engine that refuses ends the wait at once."""
        joined: list[dist.ProcessGroup] = []
        failed: list[BaseException] = []
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def join() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                joined.append(
                    sglang.join_update_group(
                        backend=backend,
                        master_address=address,
                        master_port=port,
                        world_size=world_size,
                        group_name=self.name,
                        timeout_s=self.timeout_s,
                    )
                )
            except (RuntimeError, OSError) as error:
                failed.append(error)

        thread = threading.Thread(target=join, name=f"join-{self.name}", daemon=True)
        thread.start()
        wait_all(joining, self.timeout_s)
        thread.join(self.timeout_s)
        if not joined:
            raise WeightSyncError(
                f"the trainer could not join update group {self.name} at {address}:{port} within {self.timeout_s:g} s "
                f"(--weight-update-timeout-s), though all {len(joining)} engines did"
            ) from (failed[0] if failed else None)
        return joined[0]

    def _leave(self) -> None:
        if self._group is None:
            return
        leaving = [receiver.destroy_weights_update_group(self.name) for receiver in self.receivers]
        group, self._group = self._group, None
        dist.destroy_process_group(group)
        for request in leaving:
            try:
                request.wait(self.timeout_s)
            except EngineError:
                continue  # an engine that has died is no member any more

    def broadcast(self, bucket: NamedTensors, version: str) -> None:
        """Let all engines of the group load ``bucket``."""
        names = [name for name, _ in bucket]
        requests = [
            receiver.update_weights_from_distributed(
                names=names,
                dtypes=[dtype_name(tensor.dtype) for _, tensor in bucket],
                shapes=[list(tensor.shape) for _, tensor in bucket],
                group_name=self.name,
                weight_version=version,
                load_format=sglang.FLATTENED_BUCKET,
                flush_cache=False,
            )
            for receiver in self.receivers
        ]
        work = dist.broadcast(sglang.flatten(bucket), 0, group=self._group, async_op=True)
        wait_all(requests, self.timeout_s)  # first the engines: one that died must not leave us in the broadcast
        work.wait()

    def compare(self, bucket: NamedTensors, version: str) -> None:
        """Let all engines of the group compare ``bucket`` with what they hold."""
        text = sglang.serialize_by_value(bucket)
        requests = [
            receiver.update_weights_from_tensor(
                serialized_named_tensors=[text] * receiver.num_gpus,
                load_format=sglang.COMPARE_LOADER,
                weight_version=version,
                flush_cache=False,
            )
            for receiver in self.receivers
        ]
        wait_all(requests, self.timeout_s)
