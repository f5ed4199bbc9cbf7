"""Engines that get their buckets by broadcast: a group of one trainer rank and all of their GPUs.

A broadcast needs all members, so one dead engine holds up the rest.  Then the group is abandoned, which sets the
others free; whoever is to blame is fenced; and the push is repeated over a new group without it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
from slime.weights.channel import WeightChannel
from slime.weights.receiver import Pending, WeightReceiver

logger = logging.getLogger(__name__)

FIRST_PORT = 20000
TRAINERS_SHARE = 0.75
"""Of the time that engines have to answer: the trainer gives up first, which frees those that wait for another."""
LEAVING_SHARE, MIN_LEAVING_S = 0.1, 1.0
"""How long leaving a broken group may take, as a share of the push's deadline: an abandoned engine is free at once."""
FAREWELL_S = 10.0
"""How long leaving a whole group may take outside of a push."""
COLLATERAL = "weight group"
"""What every error of a ``WeightChannel`` says: its cause may be another member."""


class UpdateGroup:
    """Rank 0 of the group is this process; the engines follow in order, one rank for each of their GPUs.

    Args:
        name: what the engines call the group.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: list[WeightReceiver] = []
        self._channel: WeightChannel | None = None

    @property
    def is_whole(self) -> bool:
        """Whether a bucket can be broadcast."""
        return self._channel is not None

    def form(self, engines: Sequence[WeightReceiver], roster: Roster, clock: PushClock) -> None:
        """Have a group of just these engines; those that do not come to it are fenced, and the group is not whole."""
        wanted = list(engines)
        if self._channel is not None and wanted == self.members:
            return
        self.leave(roster, clock)
        self.members = wanted
        if not wanted:
            return
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        address, port = net.get_current_node_ip(), net.find_available_port(FIRST_PORT)
        world_size = 1 + sum(engine.num_gpus for engine in wanted)
        offsets, offset = {}, 1
        for engine in wanted:
            offsets[engine.index] = offset
            offset += engine.num_gpus
        timeout_s = clock.step_s
        joining = _Joining(address, port, world_size=world_size, backend=backend, timeout_s=timeout_s * TRAINERS_SHARE)
        requests = start_all(
            wanted,
            lambda engine: engine.join_weight_group(
                address, port, offsets[engine.index], world_size, self.name, backend
            ),
        )
        failures = wait_together(requests, timeout_s, joining.give_up)
        channel = joining.result()
        if failures or isinstance(channel, BaseException):
            if isinstance(channel, WeightChannel):
                channel.leave()
            if not failures and isinstance(channel, BaseException):
                raise WeightSyncError(
                    f"the trainer could not join the weight group {self.name} at {address}:{port}, though all "
                    f"{len(wanted)} engines did: {channel}"
                ) from channel
            self._blame(failures, roster, clock, "joining the weight group")
            self.members = []
            return
        self._channel = channel

    def broadcast(self, push_id: str, bucket_index: int, flat: Tensor, roster: Roster, clock: PushClock) -> None:
        """Let all engines of the group load a bucket; after a failure the group is not whole."""
        channel = self._channel
        assert channel is not None, self.name
        requests = start_all(
            self.members, lambda engine: engine.receive_weight_bucket(push_id, bucket_index, None, self.name)
        )
        timeout_s = clock.step_s
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
            failures = failures or wait_together(requests, timeout_s, lambda: None)
            logger.warning("bucket %d was not broadcast in group %s: %s", bucket_index, self.name, error)
        if failures or is_broken:
            self._channel = None
            channel.leave()
            self._blame(failures, roster, clock, f"broadcasting bucket {bucket_index}")
            self.members = []

    def _blame(self, failures: dict[int, BaseException], roster: Roster, clock: PushClock, what: str) -> None:
        """Fence those that broke the group.

        Who does not even leave it is dead or hangs.  Otherwise those with an error of their own are to blame, and when
        all errors come from the group itself, the one whose error came first.
        """
        before = len(roster.reasons)
        leaving = start_all(self.members, lambda engine: engine.leave_weight_group(self.name))
        timeout_s = min(clock.step_s, max(clock.timeout_s * LEAVING_SHARE, MIN_LEAVING_S))
        for index, error in wait_together(leaving, timeout_s, lambda: None).items():
            roster.fence(index, f"{reason_of(failures.get(index, error))} (while {what})")
        if len(roster.reasons) > before:
            return
        guilty = [index for index, error in failures.items() if COLLATERAL not in str(error)]
        for index in guilty or list(failures)[:1]:
            roster.fence(index, f"{reason_of(failures[index])} (while {what})")

    def leave(self, roster: Roster | None = None, clock: PushClock | None = None) -> None:
        """Give the group up, if there is one; engines that are gone already are no members any more.

        Args:
            roster: engines outside it are not told.
            clock: of a push, if this happens in one.
        """
        if self._channel is None:
            return
        channel, self._channel = self._channel, None
        members = [engine for engine in self.members if roster is None or engine.index in roster.receivers]
        requests: dict[int, Pending] = start_all(members, lambda engine: engine.leave_weight_group(self.name))
        channel.leave()
        wait_together(requests, FAREWELL_S if clock is None else clock.step_s, lambda: None)


class _Joining:
    """The trainer joins on a thread, so that an engine that refuses ends the wait of all at once."""

    def __init__(self, address: str, port: int, *, world_size: int, backend: str, timeout_s: float) -> None:
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._outcome: WeightChannel | BaseException | None = None
        self._given_up = threading.Event()
        self._where = (address, port)
        self._options: dict[str, Any] = {"world_size": world_size, "backend": backend, "timeout_s": timeout_s}
        self._timeout_s = timeout_s
        self._thread = threading.Thread(target=self._join, name="join-weight-group", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            self._outcome = WeightChannel(*self._where, rank=0, is_cancelled=self._given_up.is_set, **self._options)
        except PUSH_FAILURES as error:
            self._outcome = error

    def give_up(self) -> None:
        """An engine will not come: let nobody wait for it."""
        self._given_up.set()

    def result(self) -> WeightChannel | BaseException:
        """The member, or why there is none."""
        self._thread.join(self._timeout_s)
        return self._outcome or TimeoutError(f"it did not join within {self._timeout_s:g} s")
