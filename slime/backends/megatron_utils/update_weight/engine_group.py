"""SGLang's process group of one trainer rank and the engines' GPUs, over which buckets are broadcast.

A broadcast needs all members: an engine that dies breaks the group for all of them.
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
from torch.distributed import distributed_c10d as c10d

from slime.backends.megatron_utils import sglang
from slime.utils import net
from slime.utils.distributed_utils import nccl_errors_left_to_us
from slime.utils.errors import WeightSyncError
from slime.weights.named_tensors import NamedTensors, dtype_name
from slime.weights.push.engine import EngineProxy
from slime.weights.push.participants import PUSH_FAILURES, Participants, reason_of, start_all, wait_together
from slime.weights.push.wire import FLATTENED_BUCKET

logger = logging.getLogger(__name__)

FIRST_PORT = 20000
FAREWELL_S = 10.0
"""Seconds that engines get to leave an intact group outside of a push."""
POLL_S = 0.02


class EngineGroup:
    """A process group: rank 0 is this process, and the engines follow in order, one rank per GPU."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: list[EngineProxy] = []
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""

    def form(self, engines: Sequence[EngineProxy], participants: Participants) -> None:
        """Form a group of exactly these engines; engines that do not join are excluded.

        Raises:
            WeightSyncError: the trainer could not join.
        """
        wanted = list(engines)
        if wanted == self.members and (self._group is not None or not wanted):
            return
        self.leave()
        self.members = wanted
        if not wanted:
            return
        place = MeetingPlace(wanted)
        timeout_s = participants.clock.step_s
        # torch accepts a name once, and may still know the name of a broken group, here or in an engine.
        self._group_name = name = f"{self.name}-{uuid4().hex[:8]}"
        with nccl_errors_left_to_us():
            joining = OnThread(
                lambda: sglang.join_update_group(
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
            self._give_up(failures, participants, f"joining update group {self.name}", joined)
            return
        self._group = joined

    def broadcast(self, bucket: NamedTensors, version: str, participants: Participants) -> None:
        """Broadcast a bucket to all engines of the group, which load it.

        If engines fail, they are excluded and the group is left.

        Raises:
            WeightSyncError: the trainer's part failed.
        """
        group = self._group
        if group is None:
            return
        flat, timeout_s = sglang.flatten(bucket), participants.clock.step_s
        requests = start_all(
            self.members,
            lambda engine: engine.update_weights_from_distributed(
                names=[name for name, _ in bucket],
                dtypes=[dtype_name(tensor.dtype) for _, tensor in bucket],
                shapes=[list(tensor.shape) for _, tensor in bucket],
                group_name=self._group_name,
                weight_version=version,
                load_format=FLATTENED_BUCKET,
            ),
        )
        # NCCL connects in the first broadcast, and waits there forever for an engine that has died.
        sending = OnThread(lambda: dist.broadcast(flat, 0, group=group, async_op=True))
        failures = wait_together(requests, timeout_s)
        work = sending.result(0 if failures else timeout_s)
        if failures or isinstance(work, BaseException):
            threading.Thread(target=_cut_off, args=[group, sending], name="leave-update-group", daemon=True).start()
            self._give_up(failures, participants, "broadcasting a bucket", work)
            return
        work.wait()

    def _give_up(self, failures: dict[int, BaseException], participants: Participants, what: str, own: Any) -> None:
        self.members, self._group = [], None
        for index, error in failures.items():
            participants.exclude(index, f"{reason_of(error)} (while {what})")
        if not failures:
            raise WeightSyncError(f"the trainer's part failed while {what}: {reason_of(own)}")

    def leave(self) -> None:
        """Leave the group, if there is one."""
        if self._group is None:
            return
        group, self._group = self._group, None
        requests = start_all(self.members, lambda engine: engine.destroy_weights_update_group(self._group_name))
        dist.destroy_process_group(group)
        wait_together(requests, FAREWELL_S)
        self.members = []


def _cut_off(group: dist.ProcessGroup, sending: OnThread) -> None:
    """Abort a group while a broadcast is in flight; a gloo group lives until the broadcast has ended."""
    c10d._abort_process_group(group)
    work = sending.result(None)
    while isinstance(work, dist.Work) and not work.is_completed():
        time.sleep(POLL_S)


class MeetingPlace:
    """Rendezvous address of a new group, and the rank of each engine's first GPU in it."""

    def __init__(self, engines: Sequence[EngineProxy]) -> None:
        self.backend = "nccl" if torch.cuda.is_available() else "gloo"
        self.address, self.port = net.collective_address(), net.find_available_port(FIRST_PORT)
        self.offsets, self.world_size = dict[int, int](), 1
        for engine in engines:
            self.offsets[engine.index] = self.world_size
            self.world_size += engine.num_gpus

    def arguments(self, engine: EngineProxy, name: str) -> tuple[Any, ...]:
        """Return an engine's arguments for joining: address, port, its first rank, size, name and backend."""
        return self.address, self.port, self.offsets[engine.index], self.world_size, name, self.backend


class OnThread:
    """Runs a call that waits for engines in a thread, on the caller's CUDA stream; the caller can stop waiting.

    Args:
        undo: called with the call's result after :meth:`drop`.
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
                torch.cuda.set_stream(self._stream)  # also selects its device
            result = call()
            with self._lock:
                self._result = result
                is_late = self._is_dropped
            if is_late and self._undo is not None:
                self._undo(result)
        except PUSH_FAILURES as error:
            # Logged here: engines that wait for this rank fail later, and their errors would hide the cause.
            logger.warning("The trainer's part in a weight group failed: %s", reason_of(error))
            self._error = error

    def drop(self) -> None:
        """Undo the call, now or when it returns.  Nothing waits for it: NCCL's handshake cannot be aborted."""
        with self._lock:
            self._is_dropped, result = True, self._result
        if result is not None and self._undo is not None:
            self._undo(result)

    def result(self, timeout_s: float | None) -> Any:
        """Return the call's result or its exception, or a TimeoutError if it has not returned in time."""
        self._thread.join(timeout_s)
        if self._result is None and self._error is None:
            return TimeoutError(f"it took more than {timeout_s or 0:g} s")
        return self._error or self._result
