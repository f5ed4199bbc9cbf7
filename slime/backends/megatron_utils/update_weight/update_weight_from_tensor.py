"""Push to engines on the trainer's own GPUs: buckets are shared, not sent.

Each trainer rank's flat buffer lies on its GPU (in shared memory on a machine without one).  The handles of the ranks
of one host are told to all of these; the first rank of each engine hands them to it, one for each of its GPUs: the
buffer of the rank on the same GPU where that has the bucket, that of any rank otherwise.  Engines outside the
trainer's range get every bucket by broadcast from rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils import memory, sglang
from slime.backends.megatron_utils.update_weight.engines.remote_engines import RemoteEngines
from slime.backends.megatron_utils.update_weight.engines.stock_engines import named_views
from slime.backends.megatron_utils.update_weight.protocol.push import Push, PushReport
from slime.backends.megatron_utils.update_weight.protocol.roster import PUSH_FAILURES, reason_of
from slime.backends.megatron_utils.update_weight.sender import WeightSender
from slime.backends.megatron_utils.update_weight.sources.bucket_source import NO_BUCKET
from slime.utils.errors import ConfigError
from slime.weights.receiver import Pending, WeightReceiver

Handles = dict[int, dict[int, str]]
"""Bucket -> GPU of an engine -> handle to a buffer with that bucket."""


class UpdateWeightFromTensor(WeightSender):
    """Colocated engines through handles, the others through one process group."""

    across_stages = True

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._engine: WeightReceiver | None = None
        self._neighbours: dist.ProcessGroup | None = None
        self._neighbour_ranks: list[int] = []
        self._are_all_in_reach = False
        self._shared_gpus: list[int] = []
        """Those of all engines that map buffers of the trainer."""
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._remote = RemoteEngines("slime")

    def connect(self, receivers: Sequence[WeightReceiver]) -> None:
        """Find the engine that shares this rank's GPU, and the ranks that can map each other's buffers."""
        world_size, rank = dist.get_world_size(), dist.get_rank()
        inside = [r for r in receivers if r.is_colocated and r.gpu_offset + r.num_gpus <= world_size]
        self._engine, self._neighbours, self._neighbour_ranks = None, None, []
        claimed: dict[int, int] = {}
        for receiver in inside:
            for gpu in range(receiver.gpu_offset, receiver.gpu_offset + receiver.num_gpus):
                if gpu in claimed:
                    raise ConfigError(
                        f"engines {claimed[gpu]} and {receiver.index} both claim the GPU of trainer rank {gpu}; check "
                        "--rollout-num-gpus-per-engine and --sglang-config"
                    )
                claimed[gpu] = receiver.index
                if gpu == rank:
                    self._engine = receiver
        self._shared_gpus = sorted(
            gpu
            for receiver in inside
            if receiver.acknowledges
            for gpu in range(receiver.gpu_offset, receiver.gpu_offset + receiver.num_gpus)
        )
        shared = neighbourhoods(inside, world_size, self.args.actor_num_gpus_per_node)
        # What one rank holds must be in reach of every engine.
        self._are_all_in_reach = shared == [list(range(world_size))] and len(inside) == len(receivers)
        for ranks in shared:
            if tuple(ranks) not in self._groups:
                # Every rank takes part in making every group.
                self._groups[tuple(ranks)] = dist.new_group(ranks, backend="gloo")
            if rank in ranks:
                self._neighbours, self._neighbour_ranks = self._groups[tuple(ranks)], ranks
        if inside:
            sglang.prepare()
        self._remote.receivers = [r for r in receivers if r not in inside] if rank == 0 else []

    @property
    def sends_shards(self) -> bool:
        """Where all engines have our loader, and all trainer ranks are on their host."""
        return self._are_all_in_reach and all(receiver.acknowledges for receiver in self.receivers)

    def form_groups(self, push: Push) -> None:
        """Rank 0 joins a group with the engines that share no GPU with the trainer."""
        self.on_main_rank(
            push, "connecting to the engines outside the trainer's GPUs", lambda: self._remote.form(push)
        )

    def _push(self) -> PushReport:
        """As the base class, with allocations outside the memory saver: its regions cannot be shared."""
        with memory.memory_saver_disabled():
            try:
                return super()._push()
            finally:
                # The engines have let go of the last buckets by now; without this they would stay taken on the card,
                # beside the engine, until the trainer next asks it for memory.
                memory.collect_shared_memory()

    def offer(self, push: Push, index: int, flat: Tensor) -> None:
        """Tell the neighbours where the bucket lies, hand it to the engine, broadcast it; wait until all have it."""
        if self._neighbours is not None:
            self._hand_over(push, self._tell_handles(index, flat), index, flat)
        if dist.get_rank() == 0 and index != NO_BUCKET and self._remote.receivers:
            self._remote.send(push, index, flat, self.source.manifest)
        if self._neighbours is not None:
            dist.barrier(group=self._neighbours)  # the buffer is written again after this
            memory.collect_shared_memory()

    def _tell_handles(self, index: int, flat: Tensor) -> Handles:
        """The handles that each GPU of the neighbourhood shall open: one for each GPU, because torch counts them."""
        assert self._neighbours is not None
        indices: list[int] = [NO_BUCKET] * len(self._neighbour_ranks)
        dist.all_gather_object(indices, index, group=self._neighbours)
        index_of = dict(zip(self._neighbour_ranks, indices, strict=True))
        rank = dist.get_rank()
        own: dict[int, str] = {}
        if index != NO_BUCKET:
            holders = [other for other, held in index_of.items() if held == index]
            neighbours = [gpu for gpu in self._shared_gpus if gpu in index_of]
            readers = [gpu for gpu in neighbours if (gpu if gpu in holders else holders[0]) == rank]
            own = {gpu: sglang.serialize_handle(flat) for gpu in readers}
        told: list[Any] = [None] * len(self._neighbour_ranks)
        dist.all_gather_object(told, own, group=self._neighbours)
        handles: Handles = {}
        for holder, handles_of in zip(self._neighbour_ranks, told, strict=True):
            for gpu, handle in handles_of.items():
                handles.setdefault(index_of[holder], {})[gpu] = handle
        return handles

    def _hand_over(self, push: Push, handles: Handles, index: int, flat: Tensor) -> None:
        """Let this rank's engine load the buckets of this step, if this rank speaks for it."""
        engine = self._engine
        if engine is None or not self.speaks_to(engine) or not push.roster.is_good(engine):
            return
        gpus = range(engine.gpu_offset, engine.gpu_offset + engine.num_gpus)
        what = "loading a bucket"
        kept: Tensor | None = None
        try:
            requests: list[Pending] = []
            if engine.acknowledges and handles:
                what = f"loading {'buckets' if len(handles) > 1 else 'bucket'} {' and '.join(map(str, handles))}"
                payloads = {bucket: [of_gpus[gpu] for gpu in gpus] for bucket, of_gpus in handles.items()}
                requests.append(receive_all(engine, push.id, payloads))
            if not engine.acknowledges and index != NO_BUCKET:
                request, kept = self._stock_request(push, engine, index, flat)
                requests.append(request)
            timeout_s = push.clock.step_s
            for request in requests:
                request.wait(timeout_s)
        except PUSH_FAILURES as error:
            push.roster.fence(engine.index, f"{reason_of(error)} (while {what})")
        del kept  # the engine has mapped it until here

    def _stock_request(self, push: Push, engine: WeightReceiver, index: int, flat: Tensor) -> tuple[Pending, Tensor]:
        """SGLang's own request for a bucket, and the buffer that must outlive it."""
        manifest = self.source.manifest
        text, buffer = sglang.serialize_bucket(named_views(flat, manifest.buckets[index], manifest))
        request = engine.update_weights_from_tensor(
            serialized_named_tensors=[text] * engine.num_gpus,
            load_format=sglang.FLATTENED_BUCKET,
            weight_version=push.version,
            flush_cache=False,
        )
        return request, buffer

    def speaks_to(self, receiver: WeightReceiver) -> bool:
        """The first rank of an engine speaks to it; rank 0 to those outside."""
        if receiver is self._engine:
            return dist.get_rank() == receiver.gpu_offset
        return receiver in self._remote.receivers

    def disconnect(self) -> None:
        """Leave the group of the engines outside."""
        self._remote.leave()


def receive_all(engine: WeightReceiver, push_id: str, payloads: dict[int, list[str]]) -> Pending:
    """Let the engine load the buckets of one turn."""
    if len(payloads) > 1:
        return engine.receive_weight_buckets(push_id, payloads)
    [(bucket, payload)] = payloads.items()
    return engine.receive_weight_bucket(push_id, bucket, payload, None)


def neighbourhoods(engines: Sequence[WeightReceiver], world_size: int, ranks_per_host: int) -> list[list[int]]:
    """The trainer ranks that must know each other's buffers: those of a host, and of all hosts of an engine.

    Ranks without an engine on any of their hosts are in none.
    """
    hosts = list(range(-(-world_size // ranks_per_host)))
    for engine in engines:
        first = hosts[engine.gpu_offset // ranks_per_host]
        touched = {
            hosts[gpu // ranks_per_host] for gpu in range(engine.gpu_offset, engine.gpu_offset + engine.num_gpus)
        }
        hosts = [first if host in touched else host for host in hosts]
    used = {hosts[engine.gpu_offset // ranks_per_host] for engine in engines}
    return [[rank for rank in range(world_size) if hosts[rank // ranks_per_host] == host] for host in sorted(used)]
