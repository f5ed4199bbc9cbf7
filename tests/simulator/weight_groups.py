"""Broadcasts of a push: the trainer runs slime's own channel over this store and these connections.

An engine's end is a server that acts on requests.  A broadcast ends once all members have joined it: a dead one
blocks the others, as with NCCL, until the trainer abandons the group or the deadline passes.  The store belongs to
the trainer, and disappears with it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from slime.ext.fast_push import channel
from tests.simulator.kernel import _KERNEL, WORLD, Process

LOOK_S = 0.25
"""Seconds between a waiting member's checks whether the group was abandoned."""
BROADCAST_S = 0.05


def state_in(tensor: torch.Tensor) -> int:
    """Return the number of the state that a bucket holds."""
    return int(tensor.view(torch.int64)[0])


class Rendezvous:
    """A store, and the group that met there."""

    def __init__(self, owner: Process, size: int) -> None:
        self.owner, self.size = owner, size
        self.words: dict[str, Any] = {}
        self.calls: list[set[int]] = []
        """The members that joined each broadcast."""
        self.sent: dict[int, int] = {}
        """Broadcast -> the state that rank 0 sends."""
        self.ends_s: dict[int, float] = {}

    @property
    def is_over(self) -> bool:
        """True if a member has abandoned the group, or its store is gone."""
        return not self.owner.is_alive or "abandoned" in self.words

    def come(self, rank: int) -> int:
        """Have a member join its next broadcast; return its number."""
        number = sum(rank in members for members in self.calls)
        if number == len(self.calls):
            self.calls.append(set())
        self.calls[number].add(rank)
        if len(self.calls[number]) == self.size:
            self.ends_s[number] = now_s() + BROADCAST_S
        return number

    def has_ended(self, number: int) -> bool:
        return number in self.ends_s and now_s() >= self.ends_s[number]

    # torch.distributed.Store

    def _require(self) -> None:
        if not self.owner.is_alive:
            raise RuntimeError("the store's owner has gone")

    def add(self, key: str, amount: int) -> int:
        self._require()
        self.words[key] = self.words.get(key, 0) + amount
        return int(self.words[key])

    def set(self, key: str, value: Any) -> None:
        self._require()
        self.words[key] = value

    def check(self, keys: list[str]) -> bool:
        self._require()
        return all(key in self.words for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        pass


def now_s() -> float:
    kernel = _KERNEL[0]
    assert kernel is not None
    return kernel.now_s


def open_store(address: str, port: int, *, rank: int, world_size: int, timeout: timedelta) -> Rendezvous:
    assert rank == 0
    kernel = _KERNEL[0]
    assert kernel is not None and kernel.current_process is not None
    made = WORLD[0].rendezvous[port] = Rendezvous(kernel.current_process, world_size)
    return made


class _Work:
    """A running broadcast on rank 0."""

    def __init__(self, group: Rendezvous, number: int, timeout_s: float) -> None:
        self._group, self._number, self._ends_s = group, number, now_s() + timeout_s

    def is_completed(self) -> bool:
        return self._group.has_ended(self._number) or now_s() >= self._ends_s

    def wait(self) -> None:
        if not self._group.has_ended(self._number):
            raise RuntimeError("Timed out waiting for a broadcast")


class _Connections:
    """Rank 0's connections to the engines."""

    def __init__(self, group: Rendezvous, timeout: timedelta) -> None:
        self._group, self._timeout_s = group, timeout.total_seconds()

    def broadcast(self, buffers: list[Any], options: Any) -> _Work:
        number = self._group.come(0)
        self._group.sent[number] = state_in(buffers[0])
        return _Work(self._group, number, self._timeout_s)


def make_backend(backend: str, store: Rendezvous, rank: int, world_size: int, timeout: timedelta) -> _Connections:
    return _Connections(store, timeout)


class Member:
    """An engine's end: what its loader waits for, without a strand."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._groups: dict[str, tuple[Rendezvous, int]] = {}

    def join(self, message: dict[str, Any], done: Callable[[str], None]) -> None:
        """Join the group of a message; ``done`` gets the problem, empty if there is none."""
        asked = message["group"]
        name, port, rank = message["group_name"], asked["master_port"], asked["rank_offset"]
        self._groups.pop(name, None)
        state: list[Rendezvous] = []
        reached_by_s = now_s() + min(channel.STORE_TIMEOUT_S, message["timeout_s"])

        def has_met() -> bool:
            group = WORLD[0].rendezvous.get(port)
            if group is None or not group.owner.is_alive:
                return False
            if not state:
                state.append(group)
                if group.add("joined", 1) == group.size:
                    group.set("complete", "1")
            if not group.check(["complete"]):
                return False
            self._groups[name] = group, rank
            return True

        def is_over() -> bool:
            return state[0].is_over if state else now_s() >= reached_by_s

        self._wait(has_met, is_over, message["timeout_s"], done)

    def leave(self, message: dict[str, Any]) -> None:
        """Leave the group of a message, if there is one."""
        self._groups.pop(message["group_name"], None)

    def receive(self, message: dict[str, Any], done: Callable[[str, int | None], None]) -> None:
        """Take part in the next broadcast of a group; ``done`` gets the problem and the received state."""
        name = message["group_name"]
        if name not in self._groups:
            done(f"this engine is not in weight group {name!r}; call join_weight_group first", None)
            return
        group, rank = self._groups[name]
        number = group.come(rank)

        def end(problem: str) -> None:
            if problem:
                self._groups.pop(name, None)
            done(problem, None if problem else group.sent[number])

        self._wait(lambda: group.has_ended(number), lambda: group.is_over, message["timeout_s"], end)

    def _wait(
        self, has_ended: Callable[[], bool], is_over: Callable[[], bool], timeout_s: float, done: Callable[[str], None]
    ) -> None:
        deadline_s = now_s() + timeout_s

        def look() -> None:
            if has_ended():
                done("")
            elif is_over():
                done("the weight group was abandoned")
            elif now_s() >= deadline_s:
                done(f"waited {timeout_s:g} s in the weight group")
            else:
                self._server.later(LOOK_S, look)

        look()


def patch_weight_groups(patches: Any, find_port: Callable[..., int]) -> None:
    from slime.utils import net

    for holder, name, value in (
        (channel, "open_store", open_store),
        (channel, "_make_backend", make_backend),
        (channel.dist, "PrefixStore", lambda name, store: store),
        (channel, "POLL_S", LOOK_S),
        (channel, "SPIN_S", BROADCAST_S),
        (net, "collective_address", lambda: "127.0.0.1"),
        (net, "find_available_port", find_port),
    ):
        patches.set(holder, name, value)
