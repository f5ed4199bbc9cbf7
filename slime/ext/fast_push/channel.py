"""A process group of one trainer rank and the GPUs of some engines, over which flat buckets are broadcast.

Both ends use it: the trainer is rank 0, our loader inside each engine joins with one rank for each GPU.  It is built
from a store and a bare backend, so it neither needs nor disturbs the process groups that either side has already.

No member waits for ever.  Every wait has the group's deadline, and any member may *abandon* the group: a word in the
store ends the waits of all the others within :data:`POLL_S`, which is how the survivors of a dead engine get free.
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
"""Interval at which a waiting member checks that the group was not abandoned."""
FAREWELL_S = 10 * POLL_S
"""Time that the store outlives a group that did not come about."""
SPIN_S = 0.0002
"""Interval at which it checks its broadcast."""
STORE_TIMEOUT_S = 10.0
"""Deadline of reaching the store, which the trainer opens as it asks the others to join, and of one question to it."""
_ABANDONED = "abandoned"


class _Connections(Protocol):
    """The calls of a torch backend that are used here; its stubs lack them."""

    def broadcast(self, buffers: list[Tensor], options: dist.BroadcastOptions) -> dist.Work: ...

    def abort(self) -> None: ...


class WeightChannel:
    """One member of the group.  Invariant: a member that met an error has left; only a new group helps.

    Args:
        backend: ``nccl`` or ``gloo``; the current device is used for ``nccl``.
        is_cancelled: asked while the others have not joined yet; true abandons the group.

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
            # All must have joined before any of them makes connections: a backend's own hand-shake is harder to end.
            if self._store.add("joined", 1) == world_size:
                self._store.set("complete", "1")
            self._wait_for_all(is_cancelled)
            limit = timedelta(seconds=timeout_s)
            self._store.set_timeout(limit)  # the hand-shake waits there for what other members write
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
        """Abandon the group, since joining failed; the store goes with its owner."""
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
            return f"only {int(self._store.add('joined', 0))} members came to the weight group"
        except RuntimeError:  # the store goes with its owner
            return "how many members came is no longer known"

    def broadcast(self, buffer: Tensor, timeout_s: float | None = None) -> None:
        """Give ``buffer`` of rank 0 to all; blocks until this rank's part is done."""
        self.wait(self.start_broadcast(buffer), timeout_s)

    def start_broadcast(self, buffer: Tensor) -> dist.Work:
        """Begin :meth:`broadcast`; :meth:`wait` ends it.  The buffer must live until then."""
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
        """Wait until ``work`` is done.  Raises as :meth:`broadcast`."""
        try:
            self._poll(work, self.timeout_s if timeout_s is None else timeout_s)
            work.wait()
        except RuntimeError as error:
            self.leave()  # at once: a broadcast that waits on a GPU would hold up whatever is asked of the GPU next
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
        """End the waits of all members with an error: one of them will not come."""
        try:
            self._store.set(_ABANDONED, "1")
        except RuntimeError:
            return  # the store's owner has gone, which the others notice as well

    @property
    def is_abandoned(self) -> bool:
        try:
            return self._store.check([_ABANDONED])
        except RuntimeError:
            return True

    def leave(self) -> None:
        """Give the connections back; pending broadcasts are cut off."""
        group, self._group = self._group, None
        if group is not None:
            arguments = [group, self._backend, self._work]
            threading.Thread(target=_tear_down, args=arguments, name="leave-weight-group", daemon=True).start()


def _tear_down(group: _Connections, backend: str, work: dist.Work | None) -> None:
    """End a group; its last reference goes with this thread.

    NCCL cuts a broadcast off.  Gloo cannot, and dropping a group with a broadcast under way stops the process; so
    it is kept until the broadcast ends, at the latest when its own deadline passes.
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
    """Make a backend that is in no registry of torch.distributed.

    Raises:
        WeightSyncError: for a backend that is neither nccl nor gloo.
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
    raise WeightSyncError(f"a weight group cannot use the backend {backend!r}; it knows nccl and gloo")
