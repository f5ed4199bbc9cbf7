"""Pushes to engines on the trainer's own GPUs: buckets are mapped (CUDA IPC; shared memory on a CPU), not copied.

The ranks of one host exchange handles.  The first rank of each engine passes it one handle per GPU: to the buffer of
the rank on the same GPU if that has the bucket, otherwise to the buffer of any rank that does.  Engines outside the
trainer's GPUs get every bucket by broadcast from rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from slime.backends.megatron_utils import sglang
from slime.ext.fast_push import engine_verbs as verbs
from slime.ext.fast_push.carrier import NO_BUCKET, CarriedPush, Carrier
from slime.ext.fast_push.distributed import WeightGroup
from slime.ext.fast_push.manifest import Manifest
from slime.utils.distributed_utils import gather_objects
from slime.utils.errors import ConfigError
from slime.weights.push.engine import EngineProxy
from slime.weights.push.participants import PUSH_FAILURES, reason_of
from slime.weights.push.state import TrainerRanks
from slime.weights.push.wire import handle_of

Handles = dict[int, dict[int, str]]
"""Bucket index -> GPU of an engine -> handle to a buffer with that bucket."""


class SharedMemoryCarrier(Carrier):
    """Reaches colocated engines through handles, and other engines through one process group."""

    def __init__(self, ranks: TrainerRanks) -> None:
        super().__init__(ranks)
        self._engine: EngineProxy | None = None
        """The engine on this rank's GPU."""
        self._neighbours: dist.ProcessGroup | None = None
        """Process group of the ranks that can map each other's buffers."""
        self._neighbour_ranks: list[int] = []
        self._mapping_gpus: list[int] = []
        """GPUs of all engines that map the trainer's buffers."""
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._buffer: StorageWeakRef | None = None
        """Storage of this rank's last bucket."""
        self._buffer_number = 0
        """Incremented when this rank's buffer or the engines change; handles are made once per number."""
        self._handles: dict[tuple[int, int], tuple[int, str]] = {}
        """(rank, GPU) -> number of the rank's buffer, and the handle with which the GPU's engine opens it."""
        self._remote = WeightGroup("slime")

    def connect(self, engines: Sequence[EngineProxy]) -> bool:
        """Find the engine on this rank's GPU and the ranks that can map each other's buffers."""
        world_size, rank = self.ranks.world_size, self.ranks.rank
        inside = [e for e in engines if e.is_colocated and e.gpus.stop <= world_size]
        engine_of_gpu: dict[int, EngineProxy] = {}
        for engine in inside:
            for gpu in engine.gpus:
                if gpu in engine_of_gpu:
                    raise ConfigError(
                        f"engines {engine_of_gpu[gpu].index} and {engine.index} both claim the GPU of trainer rank "
                        f"{gpu}; check --rollout-num-gpus-per-engine and --sglang-config"
                    )
                engine_of_gpu[gpu] = engine
        self._engine = engine_of_gpu.get(rank)
        self._mapping_gpus = sorted(engine_of_gpu)
        self._neighbours, self._neighbour_ranks = None, []
        self._buffer, self._handles = None, {}
        shared = neighbourhoods(inside, world_size, self.ranks.ranks_per_host)
        for ranks in shared:
            if tuple(ranks) not in self._groups:
                # new_group is collective over all ranks.
                self._groups[tuple(ranks)] = dist.new_group(ranks, backend="gloo")
            if rank in ranks:
                self._neighbours, self._neighbour_ranks = self._groups[tuple(ranks)], ranks
        if inside:
            sglang.prepare()
        self._remote.engines = [e for e in engines if e not in inside] if rank == 0 else []
        # Slices work only if every engine can map every rank's buffer.
        return shared == [list(range(world_size))] and len(inside) == len(engines)

    def open(self, push: CarriedPush, manifest: Manifest) -> None:
        push.on_main_rank("connecting to the engines outside the trainer's GPUs", lambda: self._remote.join(push))

    def send(self, push: CarriedPush, index: int, flat: Tensor) -> None:
        """Exchange handles, pass them to the engine, broadcast to the other engines, and wait until all have it."""
        if self._neighbours is not None:
            self._hand_over(push, self._exchange_handles(index, flat))
        if self.ranks.rank == 0 and index != NO_BUCKET and self._remote.engines:
            self._remote.send(push, index, flat)
        if self._neighbours is not None:
            dist.barrier(group=self._neighbours)  # the buffer is overwritten after this

    def finish(self, push: CarriedPush, *, is_served: bool) -> None:
        """Reclaim memory that engines have released; torch would do so only at its next allocation."""
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()

    def close(self) -> None:
        self._remote.leave()

    def _exchange_handles(self, index: int, flat: Tensor) -> Handles:
        """Return the handles that each GPU of the neighborhood opens: one per GPU, because torch counts references.

        A handle is sent once and serves every later bucket in the same buffer.
        """
        assert self._neighbours is not None and flat.storage_offset() == 0
        if flat.is_cuda:
            torch.cuda.current_stream().synchronize()  # another process reads it next
        if index != NO_BUCKET:
            buffer = StorageWeakRef(flat.untyped_storage())
            if self._buffer is None or buffer != self._buffer:
                self._buffer, self._buffer_number = buffer, self._buffer_number + 1
        told = [torch.empty(2, dtype=torch.int64) for _ in self._neighbour_ranks]
        dist.all_gather(told, torch.tensor([index, self._buffer_number]), group=self._neighbours)
        held = {rank: one.tolist() for rank, one in zip(self._neighbour_ranks, told, strict=True)}
        readers = [gpu for gpu in self._mapping_gpus if gpu in held]
        wanted: list[tuple[int, int, int]] = []  # (bucket, rank that holds it, GPU that reads it)
        for bucket in dict.fromkeys(bucket for bucket, _ in held.values() if bucket != NO_BUCKET):
            holders = [rank for rank, (other, _) in held.items() if other == bucket]
            wanted += [(bucket, gpu if gpu in holders else holders[0], gpu) for gpu in readers]
        missing = [
            (holder, gpu)
            for _, holder, gpu in wanted
            if self._handles.get((holder, gpu), (0, ""))[0] != held[holder][1]
        ]
        if missing:  # equal on all neighbors, so this collective is safe
            whole = flat.as_strided((flat.untyped_storage().nbytes(),), (1,), 0)
            own = {gpu: handle_of(whole) for holder, gpu in missing if holder == self.ranks.rank}
            of_ranks = gather_objects(own, self._neighbours)
            for holder, handles in zip(self._neighbour_ranks, of_ranks, strict=True):
                for gpu, handle in handles.items():
                    self._handles[holder, gpu] = (held[holder][1], handle)
        result: Handles = {}
        for bucket, holder, gpu in wanted:
            result.setdefault(bucket, {})[gpu] = self._handles[holder, gpu][1]
        return result

    def _hand_over(self, push: CarriedPush, handles: Handles) -> None:
        """Make this rank's engine load the buckets of this step, if this is the engine's first rank."""
        engine = self._engine
        if engine is None or self.ranks.rank != engine.gpu_offset or not push.participants.is_good(engine):
            return
        if not handles:
            return
        what = f"loading {'buckets' if len(handles) > 1 else 'bucket'} {' and '.join(map(str, handles))}"
        payloads = {bucket: [of_gpus[gpu] for gpu in engine.gpus] for bucket, of_gpus in handles.items()}
        try:
            request = engine.run(verbs.receive_weight_buckets, push.id, payloads)
            request.wait(push.participants.clock.step_s)
        except PUSH_FAILURES as error:
            push.participants.exclude(engine.index, f"{reason_of(error)} (while {what})")


def neighbourhoods(engines: Sequence[EngineProxy], world_size: int, ranks_per_host: int) -> list[list[int]]:
    """Return groups of trainer ranks that exchange handles: the ranks of a host, merged over the hosts of an engine.

    Ranks without an engine on any of their hosts are in no group.
    """
    hosts = list(range(-(-world_size // ranks_per_host)))
    for engine in engines:
        first = hosts[engine.gpu_offset // ranks_per_host]
        touched = {hosts[gpu // ranks_per_host] for gpu in engine.gpus}
        hosts = [first if host in touched else host for host in hosts]
    used = {hosts[engine.gpu_offset // ranks_per_host] for engine in engines}
    return [[rank for rank in range(world_size) if hosts[rank // ranks_per_host] == host] for host in sorted(used)]
