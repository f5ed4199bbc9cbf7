"""Hooks for the two halves of a request, at a prefill and at a decode engine: neither waits for one that has ended.

    router --both halves--> prefill: bootstrap queue -> waiting queue -> forward -> in flight -> answer
                               ^  room, places of the cache              | cache, then "done"
                               +---------------- decode: prealloc queue -+-> transfer queue -> running -> answer

SGLang 0.5.15 tells a decode engine of a transfer that failed, and a prefill engine of a request that was aborted while
both knew it.  What it does not tell, an engine waits for until a deadline of 300 s:

* A pause or an abort reaches one half while the other is on its way, or held by the pause.
* One half never comes: the connection broke, or the engine refused it.

So a prefill engine remembers the rooms that have ended.  It tells a decode engine that asks for one, at once, and ends
a half that comes later.  A decode engine that asks for a room of which no half comes is told after a while
(``--rollout-health-check-timeout``).

Its threads share sockets and tables, which are guarded here: two at one ZMQ socket mix and lose messages, and a
room that another thread forgets in between ends a thread, after which every request waits.  A message to an engine
that has gone is dropped; SGLang would hold up the scheduler without end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from slime.backends.sglang_utils.hooks import Hook

logger = logging.getLogger(__name__)

SEND_TIMEOUT_MS = 1000
ENDED_ROOMS = 100_000
"""Rooms that are remembered; the other half of a request comes within seconds."""
FAILED, WAITING = 0, 2
"""As in SGLang's KVPoll."""

_lock = threading.RLock()
_ended: OrderedDict[int, None] = OrderedDict()
_alone: dict[int, float] = {}
"""Rooms that a decode engine asks for and of which no half has come here, with the time since when."""
_guards: dict[str, GuardedSocket] = {}
_COMMON = "sglang.srt.disaggregation.common.conn"


class GuardedSocket:
    """One sender at a time; a peer that takes nothing gets nothing, and is waited for once."""

    def __init__(self, endpoint: str, socket: Any) -> None:
        self.endpoint, self.socket = endpoint, socket
        self._lock, self._flags = threading.Lock(), 0
        socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)

    def send_multipart(self, parts: Sequence[bytes]) -> None:
        if parts[0] == b"ABORT_ACK":  # the decode engine has just ended this room
            with _lock:
                _remember(int(parts[1]))
        try:
            with self._lock:
                self.socket.send_multipart(parts, self._flags)
            self._flags = 0
        except zmq.ZMQError as error:
            self._flags = zmq.NOBLOCK
            logger.warning("A message to the engine at %s is dropped, it seems to have gone: %s", self.endpoint, error)


def _guarded(endpoint: str, socket: Any) -> GuardedSocket:
    with _lock:
        if endpoint not in _guards or _guards[endpoint].socket is not socket:
            _guards[endpoint] = GuardedSocket(endpoint, socket)
        return _guards[endpoint]


def guard_prefill_socket(socket: Any, manager: Any, endpoint: str, *args: Any, **options: Any) -> GuardedSocket:
    """Return the guarded socket of a prefill engine to a decode engine."""
    return _guarded(endpoint, socket)


def guard_decode_socket(found: tuple[Any, Any], cls: type, endpoint: str, **options: Any) -> tuple[Any, Any]:
    """Return the guarded socket of a decode engine to a prefill engine, and SGLang's own lock."""
    socket, lock = found
    return _guarded(endpoint, socket), lock


class _NoneExpected(dict[int, int]):
    """Responses that a room expects; a room that was forgotten meanwhile expects none."""

    def __missing__(self, room: int) -> int:
        return 0


class _NoInfos(dict[int, dict[str, Any]]):
    """What decode engines sent of each room; of a room that was forgotten meanwhile, nothing."""

    def __missing__(self, room: int) -> dict[str, Any]:
        return {}

    def pop(self, room: int, default: Any = None) -> Any:
        return super().pop(room, default)


def guard_tables(result: None, manager: Any, *args: Any, **options: Any) -> None:
    """Have a thread that reads the table find no error where another has just forgotten the room."""
    if hasattr(manager, "required_prefill_response_num_table"):
        manager.required_prefill_response_num_table = _NoneExpected()
    if hasattr(manager, "transfer_infos"):
        manager.transfer_infos = _NoInfos()


def check_status(original: Callable[..., int], manager: Any, room: int) -> int:
    """Return a room's status; one that was forgotten has failed."""
    return int(manager.request_status.get(room, FAILED))


def record_failure(original: Callable[..., None], manager: Any, room: int, reason: str) -> None:
    """Record why a room failed, where somebody is left to read it."""
    if room in manager.request_status:
        original(manager, room, reason)


def update_status(original: Callable[..., None], manager: Any, room: int, status: int) -> None:
    """Note a room that comes from the decode engine first; refuse one that has ended."""
    with _lock:
        is_asked = status == WAITING and _can_tell(manager)
        if is_asked and room in _ended:  # SGLang would also take a failed one up again that is not cleared yet
            _tell(manager, room)
            return
        is_first = is_asked and room not in manager.request_status
        original(manager, room, status)
        if is_first:
            _alone[room] = time.monotonic()


def begin_sender(result: None, sender: Any, *args: Any, **options: Any) -> None:
    """Note that the prefill half has come; end it if the room has ended."""
    manager, room = sender.kv_mgr, sender.bootstrap_room
    with _lock:
        _alone.pop(room, None)
        if room in _ended:
            manager.record_failure(room, "The decode engine had ended its half of the request.")
            manager.update_status(room, FAILED)


def end_sender(result: None, sender: Any) -> None:
    """Tell the decode engine that its half waits in vain."""
    _end(sender.kv_mgr, sender.bootstrap_room)


def clear_sender(sender: Any) -> None:
    """Tell the decode engine of a request that failed."""
    if sender.conclude_state == FAILED:
        _end(sender.kv_mgr, sender.bootstrap_room)


def _end(manager: Any, room: int) -> None:
    with _lock:
        if room not in _ended and _can_tell(manager):
            _remember(room)
            _tell(manager, room)


def _can_tell(manager: Any) -> bool:
    """Return whether the transfers are Mooncake's; other backends report it in other ways."""
    return hasattr(manager, "sync_status_to_decode_endpoint")


def _remember(room: int) -> None:
    _ended[room] = None
    _alone.pop(room, None)
    if len(_ended) > ENDED_ROOMS:
        _ended.popitem(last=False)


def _tell(manager: Any, room: int) -> list[str]:
    """Tell the decode engine that the room has ended; return its addresses."""
    infos = [info for info in (manager.transfer_infos.pop(room, None) or {}).values() if not info.is_dummy]
    for info in infos:
        manager.sync_status_to_decode_endpoint(info.endpoint, info.dst_port, room, FAILED, 0)
    return [f"{info.endpoint}:{info.dst_port}" for info in infos]


def end_lonely_rooms(queue: Any, *, patience_s: float) -> None:
    """End the rooms of which the prefill half has not come in time; called in every round of the scheduler."""
    for room, since_s in list(_alone.items()):
        if time.monotonic() - since_s < patience_s:
            break  # the others came later
        manager = queue.kv_manager
        with _lock:
            _remember(room)
            decode = _tell(manager, room)
            manager.request_status.pop(room, None)
        logger.error(
            "The decode engine at %s waits for room %d, and no request for it came to this prefill engine (bootstrap "
            "port %d) in %g s (--rollout-health-check-timeout). It is told to give up; the router asks again.",
            ", ".join(decode),
            room,
            manager.bootstrap_port,
            patience_s,
        )


def abort_in_scheduler(original: Callable[..., None], scheduler: Any, request: Any) -> None:
    """Let transfers end that are on their way, and tell decode engines of requests that leave the waiting queue."""
    if scheduler.disaggregation_mode.value != "prefill":
        original(scheduler, request)
        return
    waiting, in_flight = list(scheduler.waiting_queue), scheduler.disagg_prefill_inflight_queue
    scheduler.disagg_prefill_inflight_queue = []
    try:
        original(scheduler, request)
    finally:
        scheduler.disagg_prefill_inflight_queue = in_flight
    left = {id(req) for req in scheduler.waiting_queue}
    for req in waiting:
        sender: Any = getattr(req, "disagg_kv_sender", None)
        if id(req) not in left and hasattr(sender, "clear"):  # the sender of a health check has no room
            sender.abort()
            sender.clear()


HOOKS: tuple[Hook, ...] = (
    (f"{_COMMON}.CommonKVManager.__init__", guard_tables, "after"),
    (f"{_COMMON}.CommonKVManager._connect", guard_prefill_socket, "after"),
    (f"{_COMMON}.CommonKVReceiver._connect", guard_decode_socket, "after"),
    (f"{_COMMON}.CommonKVManager.check_status", check_status, "around"),
    (f"{_COMMON}.CommonKVManager.record_failure", record_failure, "around"),
    (f"{_COMMON}.CommonKVManager.update_status", update_status, "around"),
    (f"{_COMMON}.CommonKVSender.__init__", begin_sender, "after"),
    (f"{_COMMON}.CommonKVSender.abort", end_sender, "after"),
    (f"{_COMMON}.CommonKVSender.clear", clear_sender, "before"),
    ("sglang.srt.managers.scheduler.Scheduler.abort_request", abort_in_scheduler, "around"),
)
"""For the one version of SGLang that they were written for."""
LONELY_ROOMS = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.pop_bootstrapped"
"""Target of :func:`end_lonely_rooms`, after which that is called."""
