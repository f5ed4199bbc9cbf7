"""Engines that get their buckets by broadcast, over a process group of one trainer rank and all of their GPUs.

A broadcast needs all members, so one dead engine holds up the rest.  With our loader in the engines the group is then
abandoned, which sets the others free; those to blame are excluded; and the push is repeated over a new group without
them.  Engines without our loader are in a group of SGLang's own: its endpoints carry the buckets, nothing is
acknowledged but the version, and an engine that breaks the group takes the others with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from slime.utils import net
from slime.utils.errors import WeightSyncError
from slime.weights.channel import POLL_S, WeightChannel, nccl_errors_left_to_us
from slime.weights.manifest import Manifest
from slime.weights.named_tensors import NamedTensors, dtype_name
from slime.weights.push.participants import PUSH_FAILURES, Participants, reason_of, start_all, wait_together
from slime.weights.push.state import Push
from slime.weights.push.verbs import EngineProxy
from slime.weights.push.wire import FLATTENED_BUCKET, StockWire, named_views

logger = logging.getLogger(__name__)

FIRST_PORT = 20000
TRAINERS_SHARE = 0.75
"""Of the time that engines have to answer: the trainer gives up first, which frees those that wait for another."""
LEAVING_SHARE, MIN_LEAVING_S = 0.1, 1.0
"""Time to leave a broken group, as a share of the push's deadline: an abandoned engine is free at once."""
FAREWELL_S = 10.0
"""Time to leave a whole group outside of a push."""
COLLATERAL = "weight group"
"""Part of every error of a ``WeightChannel``: its cause may be another member."""


class EngineGroups:
    """The engines that one trainer rank reaches by broadcast, in one group of each kind; either may be empty.

    Args:
        name: what the engines call the groups.
        wire: for engines without our loader.
    """

    def __init__(self, name: str, wire: StockWire) -> None:
        self.engines: list[EngineProxy] = []
        self._group = UpdateGroup(name)
        self._stock = StockGroup(name, wire)

    def form(self, push: Push) -> None:
        """Have groups of just the engines that are still in the push, or ask for another try without some of them."""
        good = [engine for engine in self.engines if push.participants.is_good(engine)]
        wanted = [engine for engine in good if engine.acknowledges]
        self._group.form(wanted, push.participants)
        if wanted and not self._group.is_whole:
            push.must_repeat = True
        self._stock.form([engine for engine in good if not engine.acknowledges], push.participants)

    def send(self, push: Push, index: int, flat: Tensor, manifest: Manifest) -> None:
        """Broadcast a bucket to both groups; once a broadcast broke, nothing more until the push is repeated."""
        if push.must_repeat or push.failures:
            return
        try:
            if self._group.is_whole:
                self._group.broadcast(push.id, index, flat, push.participants)
                push.must_repeat = not self._group.is_whole
            if self._stock.members:
                bucket = named_views(flat, manifest.buckets[index], manifest)
                self._stock.broadcast(bucket, push.version, push.participants)
        except PUSH_FAILURES as error:
            push.failures.append(error)  # go on through the buckets: the other ranks gather with this one

    def leave(self) -> None:
        """Leave both groups."""
        self._group.leave()
        self._stock.leave()


class UpdateGroup:
    """Engines with our loader.  Rank 0 is this process; the engines follow in order, one rank for each GPU."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: list[EngineProxy] = []
        self._channel: WeightChannel | None = None

    @property
    def is_whole(self) -> bool:
        """True when a bucket can be broadcast."""
        return self._channel is not None

    def form(self, engines: Sequence[EngineProxy], participants: Participants) -> None:
        """Have a group of just these engines; those that do not come are excluded, and the group is not whole."""
        wanted = list(engines)
        if self._channel is not None and wanted == self.members:
            return
        self.leave(participants)
        self.members = wanted
        if not wanted:
            return
        place = _MeetingPlace(wanted)
        timeout_s = participants.clock.step_s
        given_up = threading.Event()
        joining = _OnThread(
            lambda: WeightChannel(
                place.address, place.port, rank=0, world_size=place.world_size, backend=place.backend,
                timeout_s=timeout_s * TRAINERS_SHARE, is_cancelled=given_up.is_set,
            ),
            WeightChannel.leave,
        )  # fmt: skip
        requests = start_all(wanted, lambda engine: engine.join_weight_group(*place.arguments(engine, self.name)))
        failures = wait_together(requests, timeout_s, given_up.set)
        if failures:
            joining.drop()
            self._blame(failures, participants, "joining the weight group")
            self.members = []
            return
        channel = joining.result(timeout_s * TRAINERS_SHARE)
        if not isinstance(channel, WeightChannel):
            given_up.set()
            joining.drop()
            raise WeightSyncError(
                f"the trainer could not join the weight group {self.name} at "
                f"{net.format_host_port(place.address, place.port)}, though all {len(wanted)} engines did: {channel}"
            )
        self._channel = channel

    def broadcast(self, push_id: str, bucket_index: int, flat: Tensor, participants: Participants) -> None:
        """Let all engines of the group load a bucket; after a failure the group is not whole."""
        channel = self._channel
        assert channel is not None, self.name
        requests = start_all(
            self.members, lambda engine: engine.receive_weight_bucket(push_id, bucket_index, self.name)
        )
        timeout_s = participants.clock.step_s
        failures: dict[int, BaseException] = {}
        is_broken = False

        def give_up() -> None:
            channel.abandon()
            channel.leave()

        try:
            work = channel.start_broadcast(flat)
            freeing = threading.Timer(timeout_s * TRAINERS_SHARE, give_up)
            freeing.start()
            failures = wait_together(requests, timeout_s, give_up)
            freeing.cancel()
            if not failures:
                channel.wait(work, timeout_s)
        except WeightSyncError as error:  # ours; which of the engines is to blame is seen when they leave
            channel.abandon()
            is_broken = True
            failures = failures or wait_together(requests, timeout_s)
            logger.warning("bucket %d was not broadcast in group %s: %s", bucket_index, self.name, error)
        if failures or is_broken:
            self._channel = None
            channel.leave()
            self._blame(failures, participants, f"broadcasting bucket {bucket_index}")
            self.members = []

    def _blame(self, failures: dict[int, BaseException], participants: Participants, what: str) -> None:
        """Exclude those that broke the group.

        An engine that does not even leave it is dead or hangs.  Otherwise those with an error of their own are to
        blame, and when all errors come from the group itself, the one whose error came first.
        """
        before, clock = len(participants.reasons), participants.clock
        leaving = start_all(self.members, lambda engine: engine.leave_weight_group(self.name))
        timeout_s = min(clock.step_s, max(clock.timeout_s * LEAVING_SHARE, MIN_LEAVING_S))
        for index, error in wait_together(leaving, timeout_s).items():
            participants.exclude(index, f"{reason_of(failures.get(index, error))} (while {what})")
        if len(participants.reasons) > before:
            return
        guilty = [index for index, error in failures.items() if COLLATERAL not in str(error)]
        for index in guilty or list(failures)[:1]:
            participants.exclude(index, f"{reason_of(failures[index])} (while {what})")

    def leave(self, participants: Participants | None = None) -> None:
        """Leave the group, if there is one; within a push, engines that are not in it (any more) are not told."""
        if self._channel is None:
            return
        channel, self._channel = self._channel, None
        members = [e for e in self.members if participants is None or e in participants.good]
        requests = start_all(members, lambda engine: engine.leave_weight_group(self.name))
        channel.leave()
        wait_together(requests, FAREWELL_S if participants is None else participants.clock.step_s)


class StockGroup:
    """Engines without our loader, in SGLang's process group.  One that breaks it takes the others with it."""

    def __init__(self, name: str, wire: StockWire) -> None:
        self.name = name
        self.members: list[EngineProxy] = []
        self._wire = wire
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""

    def form(self, engines: Sequence[EngineProxy], participants: Participants) -> None:
        """Have a group of just these engines; when one does not come, all are excluded."""
        wanted = list(engines)
        if wanted == self.members and (self._group is not None or not wanted):
            return
        self.leave()
        self.members = wanted
        if not wanted:
            return
        self._wire.prepare()
        place = _MeetingPlace(wanted)
        timeout_s = participants.clock.step_s
        # Torch takes a name once, and may have that of a broken group still, here or in an engine.
        self._group_name = name = f"{self.name}-{uuid4().hex[:8]}"
        with nccl_errors_left_to_us():
            joining = _OnThread(
                lambda: self._wire.join_update_group(
                    backend=place.backend, master_address=place.address, master_port=place.port,
                    world_size=place.world_size, group_name=name, timeout_s=timeout_s,
                ),
                dist.destroy_process_group,
            )  # fmt: skip
            requests = start_all(
                wanted, lambda engine: engine.init_weights_update_group(*place.arguments(engine, name))
            )
            failures = wait_together(requests, timeout_s)
            joined = joining.result(0 if failures else timeout_s)
        if failures or isinstance(joined, BaseException):
            joining.drop()
            self._exclude_all(failures, participants, f"joining update group {self.name}", trainers=joined)
            return
        self._group = joined

    def broadcast(self, bucket: NamedTensors, version: str, participants: Participants) -> None:
        """Let all engines of the group load a bucket; after a failure all are excluded."""
        group = self._group
        if group is None:
            return
        flat, timeout_s = self._wire.flatten(bucket), participants.clock.step_s
        requests = start_all(
            self.members,
            lambda engine: engine.update_weights_from_distributed(
                names=[name for name, _ in bucket],
                dtypes=[dtype_name(tensor.dtype) for _, tensor in bucket],
                shapes=[list(tensor.shape) for _, tensor in bucket],
                group_name=self._group_name,
                weight_version=version,
                load_format=FLATTENED_BUCKET,
                flush_cache=False,
            ),
        )
        # NCCL connects in the first broadcast, and waits there without end for an engine that has died.
        sending = _OnThread(lambda: dist.broadcast(flat, 0, group=group, async_op=True))
        failures = wait_together(requests, timeout_s)
        work = sending.result(0 if failures else timeout_s)
        if failures or isinstance(work, BaseException):
            self._exclude_all(failures, participants, "broadcasting a bucket", trainers=work)
            threading.Thread(target=_cut_off, args=[group, sending], name="leave-update-group", daemon=True).start()
            return
        work.wait()

    def _exclude_all(
        self, failures: dict[int, BaseException], participants: Participants, what: str, *, trainers: Any = None
    ) -> None:
        """Exclude all members, for the first failure or, without one, for the trainer's."""
        blamed = f"the trainer's part failed: {reason_of(trainers)}"
        if failures:
            blamed = f"engine {next(iter(failures))} broke the update group"
        for engine in self.members:
            own = failures.get(engine.index)
            participants.exclude(engine.index, f"{reason_of(own) if own is not None else blamed} (while {what})")
        self.members, self._group = [], None

    def leave(self) -> None:
        """Leave the group, if there is one."""
        if self._group is None:
            return
        group, self._group = self._group, None
        requests = start_all(self.members, lambda engine: engine.destroy_weights_update_group(self._group_name))
        dist.destroy_process_group(group)
        wait_together(requests, FAREWELL_S)
        self.members = []


def _cut_off(group: dist.ProcessGroup, sending: _OnThread) -> None:
    """End a group with a broadcast under way, as a ``WeightChannel`` ends its own: gloo's lives until it has ended."""
    c10d._abort_process_group(group)
    work = sending.result(None)
    while isinstance(work, dist.Work) and not work.is_completed():
        time.sleep(POLL_S)


class _MeetingPlace:
    """Address at which a new group meets, and the rank of each engine's first GPU in it."""

    def __init__(self, engines: Sequence[EngineProxy]) -> None:
        self.backend = "nccl" if torch.cuda.is_available() else "gloo"
        self.address, self.port = net.collective_address(), net.find_available_port(FIRST_PORT)
        self.offsets, self.world_size = dict[int, int](), 1
        for engine in engines:
            self.offsets[engine.index] = self.world_size
            self.world_size += engine.num_gpus

    def arguments(self, engine: EngineProxy, name: str) -> tuple[Any, ...]:
        """Return what the engine's verb of joining takes."""
        return self.address, self.port, self.offsets[engine.index], self.world_size, name, self.backend


class _OnThread:
    """A call that waits for engines, on a thread and the caller's stream: one that refuses ends all waits at once.

    Args:
        call: as to join a group, once all have come.
        undo: gets what the call returned where that was too late.
    """

    def __init__(self, call: Callable[[], Any], undo: Callable[[Any], None] | None = None) -> None:
        self._stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        self._undo = undo
        self._lock = threading.Lock()
        self._result: Any = None
        self._error: BaseException | None = None
        self._is_dropped = False
        self._thread = threading.Thread(target=self._run, args=[call], name="weight-group", daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            if self._stream is not None:
                torch.cuda.set_stream(self._stream)  # and its device
            result = call()
            with self._lock:
                self._result = result
                is_late = self._is_dropped
            if is_late and self._undo is not None:
                self._undo(result)
        except PUSH_FAILURES as error:
            # Said here, because engines that wait for this rank fail later, and are blamed.
            logger.warning("the trainer's part in a weight group failed: %s", reason_of(error))
            self._error = error

    def drop(self) -> None:
        """Undo the call, now or once it returns: NCCL's hand-shake cannot be ended, so nobody waits for it."""
        with self._lock:
            self._is_dropped, result = True, self._result
        if result is not None and self._undo is not None:
            self._undo(result)

    def result(self, timeout_s: float | None) -> Any:
        """Return what the call returned, or its error, or that it has not ended in time."""
        self._thread.join(timeout_s)
        if self._result is None and self._error is None:
            return TimeoutError(f"it took more than {timeout_s or 0:g} s")
        return self._error or self._result
