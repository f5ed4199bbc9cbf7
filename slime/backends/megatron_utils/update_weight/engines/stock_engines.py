"""Engines without our loader: SGLang's own endpoints carry the buckets, and nobody acknowledges anything.

They are external engines that were started without ``--custom-weight-loader``.  What they say of their version is all
that is known of them.  Their buckets must hold whole tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils import sglang
from slime.backends.megatron_utils.update_weight.protocol.roster import (
    PUSH_FAILURES,
    PushClock,
    Roster,
    reason_of,
    start_all,
    wait_together,
)
from slime.utils import net
from slime.utils.errors import WeightSyncError
from slime.weights.manifest import BucketEntry, Manifest
from slime.weights.named_tensors import NamedTensors, dtype_name
from slime.weights.receiver import WeightReceiver

FIRST_PORT = 20500


def named_views(flat: Tensor, entry: BucketEntry, manifest: Manifest) -> NamedTensors:
    """The tensors of a bucket, as views of its buffer.

    Raises:
        WeightSyncError: the bucket holds a part of a tensor.
    """
    tensors: NamedTensors = []
    for part in entry.slices:
        whole = manifest.by_name[part.name]
        if part.slice.sizes != whole.shape:
            raise WeightSyncError(
                f"a bucket holds {list(part.slice.sizes)} of {part.name}, whose shape is {list(whole.shape)}; "
                "only our own loader takes slices"
            )
        data = flat[part.offset : part.offset + whole.num_bytes]
        tensors.append((part.name, data.view(whole.torch_dtype).view(whole.shape)))
    return tensors


class StockGroup:
    """SGLang's process group of this rank and some engines.  An engine that breaks it takes the others with it.

    Args:
        name: what the engines call the group.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: list[WeightReceiver] = []
        self._group: dist.ProcessGroup | None = None

    def form(self, engines: Sequence[WeightReceiver], roster: Roster, clock: PushClock) -> None:
        """Have a group of just these engines; when one does not come, all are fenced."""
        wanted = list(engines)
        if wanted == self.members and (self._group is not None or not wanted):
            return
        self.leave()
        self.members = wanted
        if not wanted:
            return
        sglang.prepare()
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        address, port = net.get_current_node_ip(), net.find_available_port(FIRST_PORT)
        world_size = 1 + sum(engine.num_gpus for engine in wanted)
        offsets, offset = {}, 1
        for engine in wanted:
            offsets[engine.index] = offset
            offset += engine.num_gpus
        joined: list[dist.ProcessGroup] = []
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        timeout_s = clock.step_s

        def join() -> None:
            if device is not None:
                torch.cuda.set_device(device)
            try:
                joined.append(
                    sglang.join_update_group(
                        backend=backend, master_address=address, master_port=port, world_size=world_size,
                        group_name=self.name, timeout_s=timeout_s,
                    )
                )  # fmt: skip
            except PUSH_FAILURES:
                return  # told below: there is no group

        # On a thread, so that an engine that refuses ends the wait at once.
        thread = threading.Thread(target=join, name=f"join-{self.name}", daemon=True)
        thread.start()
        requests = start_all(
            wanted,
            lambda engine: engine.init_weights_update_group(
                address, port, offsets[engine.index], world_size, self.name, backend
            ),
        )
        failures = wait_together(requests, timeout_s, lambda: None)
        if not failures:
            thread.join(timeout_s)
        if failures or not joined:
            self._fence_all(failures, roster, f"joining update group {self.name}")
            return
        self._group = joined[0]

    def broadcast(self, bucket: NamedTensors, version: str, roster: Roster, clock: PushClock) -> None:
        """Let all engines of the group load a bucket; after a failure all are fenced."""
        if self._group is None:
            return
        requests = start_all(
            self.members,
            lambda engine: engine.update_weights_from_distributed(
                names=[name for name, _ in bucket],
                dtypes=[dtype_name(tensor.dtype) for _, tensor in bucket],
                shapes=[list(tensor.shape) for _, tensor in bucket],
                group_name=self.name,
                weight_version=version,
                load_format=sglang.FLATTENED_BUCKET,
                flush_cache=False,
            ),
        )
        work = dist.broadcast(sglang.flatten(bucket), 0, group=self._group, async_op=True)
        # First the engines: one that died must not leave us in the broadcast.
        failures = wait_together(requests, clock.step_s, lambda: None)
        if failures:
            self._fence_all(failures, roster, "broadcasting a bucket")
            return
        work.wait()

    def _fence_all(self, failures: dict[int, BaseException], roster: Roster, what: str) -> None:
        first = next(iter(failures), None)
        for engine in self.members:
            own = failures.get(engine.index)
            blamed = "the trainer could not join" if first is None else f"engine {first} broke the update group"
            roster.fence(engine.index, f"{reason_of(own) if own is not None else blamed} (while {what})")
        self.members, self._group = [], None

    def leave(self) -> None:
        """Give the group up, if there is one."""
        if self._group is None:
            return
        group, self._group = self._group, None
        requests = start_all(self.members, lambda engine: engine.destroy_weights_update_group(self.name))
        dist.destroy_process_group(group)
        wait_together(requests, 10.0, lambda: None)
        self.members = []
