"""A process group of one trainer rank and the GPUs of some engines, for broadcasting flat buckets.

Both ends use this class: the trainer is rank 0, and slime's loader inside each engine joins with one rank per GPU.  It
is built from a store and a bare backend, so it neither needs nor disturbs existing process groups on either side.

No member waits forever.  Every wait has the group's deadline, and any member may *abandon* the group: a key in the
store ends the waits of all others within :data:`POLL_S`, which frees the survivors of a dead engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from slime.utils import env, net
from slime.utils.distributed_utils import nccl_errors_left_to_us, open_store
from slime.utils.errors import WeightSyncError

POLL_S = 0.02
"""Seconds between a waiting member's checks that the group was not abandoned."""
FAREWELL_S = 10 * POLL_S
"""Seconds that the store outlives a group that failed to form."""
SPIN_S = 0.0002
"""Seconds between a waiting member's checks of its broadcast."""
STORE_TIMEOUT_S = 10.0
"""Deadline in seconds for one request to the store and for connecting to it; the trainer opens it as others join."""
_ABANDONED = "abandoned"


class _Connections(Protocol):
    """The methods of a torch backend used here; torch's stubs lack them."""

    def broadcast(self, buffers: list[Tensor], options: dist.BroadcastOptions) -> dist.Work: ...

    def abort(self) -> None: ...


class WeightChannel:
    """One member of the group.  A member that hits an error has left the group; recovery needs a new group.

    Args:
        backend: ``nccl`` (on the current device) or ``gloo``.
        timeout_s: deadline of joining, and the default deadline of a broadcast.
        is_cancelled: polled until all have joined; True abandons the group.

    Raises:
        WeightSyncError: not all members joined in time, or one of them abandoned the group.
    """

    def __init__(
        self,
        master_address: str,
        master_port: int,
        *,
        rank: int,
        world_size: int,
        backend: str,
        timeout_s: float,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self._backend = backend
        self._work: dist.Work | None = None
        question = timedelta(seconds=min(STORE_TIMEOUT_S, timeout_s))
        try:
            self._store = open_store(master_address, master_port, rank=rank, world_size=world_size, timeout=question)
            # Wait for all members before connecting, because a backend's handshake is harder to interrupt.
            if self._store.add("joined", 1) == world_size:
                self._store.set("complete", "1")
            self._wait_for_all(is_cancelled)
            limit = timedelta(seconds=timeout_s)
            self._store.set_timeout(limit)  # the handshake waits in the store for other members
            store = dist.PrefixStore("group", self._store)
            self._group: _Connections | None = _make_backend(backend, store, rank, world_size, limit)
        except (RuntimeError, ValueError) as error:  # torch's DistStoreError, DistNetworkError, DistBackendError
            self._abandon_unjoined()
            raise WeightSyncError(
                f"rank {rank} of {world_size} could not join the weight group at "
                f"{net.format_host_port(master_address, master_port)} (--weight-update-timeout-s {timeout_s:g}): "
                f"{error}{_nccl_settings(backend)}"
            ) from error
        self._store.set_timeout(question)

    def _abandon_unjoined(self) -> None:
        """Abandon the group after a failure to join; rank 0 waits so that others can read that from its store."""
        if vars(self).get("_store") is None:
            return
        self.abandon()
        if self.rank == 0:
            time.sleep(FAREWELL_S)

    def _wait_for_all(self, is_cancelled: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + self.timeout_s
        while not self._store.check(["complete"]):
            if is_cancelled():
                self.abandon()
            if self.is_abandoned:
                raise ValueError(f"a member abandoned the weight group before all had joined: {self._who_came()}")
            if time.monotonic() >= deadline_s:
                raise ValueError(self._who_came())
            time.sleep(POLL_S)

    def _who_came(self) -> str:
        try:
            return f"only {int(self._store.add('joined', 0))} members joined the weight group"
        except RuntimeError:  # the store's owner has gone
            return "it is unknown how many members joined"

    def broadcast(self, buffer: Tensor, timeout_s: float | None = None) -> None:
        """Broadcast ``buffer`` from rank 0; blocks until this rank's part is done."""
        self.wait(self.start_broadcast(buffer), timeout_s)

    def start_broadcast(self, buffer: Tensor) -> dist.Work:
        """Start a broadcast; :meth:`wait` completes it.  The buffer must stay alive until then."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.asyncOp = True
        if self._group is None:
            raise WeightSyncError(f"rank {self.rank} has left the weight group")
        try:
            self._work = self._group.broadcast([buffer], options)
            return self._work
        except RuntimeError as error:
            self.leave()
            raise WeightSyncError(f"rank {self.rank} of the weight group could not broadcast: {error}") from error

    def wait(self, work: dist.Work, timeout_s: float | None = None) -> None:
        """Wait until ``work`` is done.

        Raises:
            WeightSyncError: the broadcast failed, timed out, or the group was abandoned.
        """
        try:
            self._poll(work, self.timeout_s if timeout_s is None else timeout_s)
            work.wait()
        except RuntimeError as error:
            self.leave()  # at once: a broadcast pending on a GPU would block later GPU work
            if isinstance(error, WeightSyncError):
                raise
            raise WeightSyncError(f"a broadcast failed on rank {self.rank} of the weight group: {error}") from error

    def _poll(self, work: dist.Work, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        next_look_s = time.monotonic() + POLL_S
        while not work.is_completed():
            now_s = time.monotonic()
            if now_s >= deadline_s:
                raise WeightSyncError(
                    f"rank {self.rank} of the weight group waited {timeout_s:g} s for a broadcast "
                    "(--weight-update-timeout-s); another member is slow or dead"
                )
            if now_s >= next_look_s:
                if self.is_abandoned:
                    raise WeightSyncError(f"the weight group was abandoned while rank {self.rank} waited in it")
                next_look_s = now_s + POLL_S
            time.sleep(SPIN_S)

    def abandon(self) -> None:
        """End the waits of all members with an error, because one of them will not take part."""
        try:
            self._store.set(_ABANDONED, "1")
        except RuntimeError:
            return  # the store's owner has gone; the others notice that too

    @property
    def is_abandoned(self) -> bool:
        try:
            return self._store.check([_ABANDONED])
        except RuntimeError:
            return True

    def leave(self) -> None:
        """Close the connections in the background; pending broadcasts are cut off."""
        group, self._group = self._group, None
        if group is not None:
            arguments = [group, self._backend, self._work]
            threading.Thread(target=_tear_down, args=arguments, name="leave-weight-group", daemon=True).start()


def _tear_down(group: _Connections, backend: str, work: dist.Work | None) -> None:
    """End a group, whose last reference this thread holds.

    NCCL can abort a broadcast.  Gloo cannot, and dropping a group with a pending broadcast kills the process; so the
    group is kept until the broadcast ends, at the latest at its own deadline.
    """
    if backend == "nccl":
        group.abort()
    while work is not None and not work.is_completed():
        time.sleep(POLL_S)


def _nccl_settings(backend: str) -> str:
    if backend != "nccl":
        return ""
    setting = env.get_str("NCCL_CUMEM_ENABLE") or "not set"
    return f"; NCCL_CUMEM_ENABLE is {setting} here and must be the same in all members"


def _make_backend(backend: str, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> _Connections:
    """Make a backend that is not registered with torch.distributed.

    Raises:
        WeightSyncError: the backend is neither nccl nor gloo.
    """
    if backend == "gloo":
        return cast(_Connections, dist.ProcessGroupGloo(store, rank, world_size, timeout))
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with nccl_errors_left_to_us():
            group = dist.ProcessGroupNCCL(store, rank, world_size, options)
        group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
        return cast(_Connections, group)
    raise WeightSyncError(f"a weight group cannot use the backend {backend!r}; it must be nccl or gloo")
