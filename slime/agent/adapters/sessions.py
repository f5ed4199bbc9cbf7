"""Which sessions are open, and how one ends while its requests may run in another thread."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict

from slime.agent.adapters.common import AdapterError, Session

logger = logging.getLogger(__name__)

POLL_S = 0.05
CANCEL_WAIT_S = 5.0
"""For a cancelled request to send its last words."""
REMEMBERED_CLOSED = 100_000
"""Closed sessions whose late requests are told apart from those of new sessions."""


class SessionBook:
    """The sessions of one adapter.  Invariant: an id is open, closed or unknown; it never opens twice."""

    def __init__(self, max_turns_per_sid: int | None = None) -> None:
        self.max_turns_per_sid = max_turns_per_sid
        self._open: dict[str, Session] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, session: Session) -> None:
        """Open a session.  ValueError when its id is, or was, in use."""
        with self._lock:
            if session.sid in self._open or session.sid in self._closed:
                raise ValueError(f"Session {session.sid!r} exists already; every session needs an id of its own.")
            self._open[session.sid] = session

    def admit(self, sid: str) -> Session:
        """The session with one more turn counted; an id that was never seen is opened.

        Raises:
            AdapterError: the session is closed (503) or has used its turns (429).
        """
        with self._lock:
            session = None if sid in self._closed else self._open.setdefault(sid, Session(sid=sid))
            if session is None or session.is_closed:
                raise AdapterError(503, f"Session {sid!r} is closed.", may_retry=False)
            if self.max_turns_per_sid is not None and session.num_turns >= self.max_turns_per_sid:
                message = f"Session {sid!r} has used its {self.max_turns_per_sid} turns."
                raise AdapterError(429, message, code="turn_limit", may_retry=False)
            session.num_turns += 1
            return session

    async def shut(self, sid: str, wait_timeout: float) -> Session | None:
        """Refuse further requests of ``sid``, wait for those in flight, cancel what is left; None: it is not open."""
        session = self._open.get(sid)
        if session is None:
            return None
        session.is_closed = True
        deadline = time.monotonic() + wait_timeout
        while session.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        leftover = list(session.in_flight)
        for task in leftover:
            loop = task.get_loop()
            if loop.is_closed():
                session.in_flight.discard(task)
            else:
                loop.call_soon_threadsafe(task.cancel)
        if leftover:
            logger.warning("Session %s was closed with %d turn(s) in flight.", sid, len(leftover))
        give_up = time.monotonic() + CANCEL_WAIT_S
        while session.in_flight and time.monotonic() < give_up:
            await asyncio.sleep(POLL_S)
        return session

    async def close(self, sid: str, wait_timeout: float) -> Session | None:
        """``shut``, and forget the session; the second caller gets None."""
        with self._lock:
            if sid not in self._open or sid in self._closed:
                return None
            self._closed[sid] = None
            while len(self._closed) > REMEMBERED_CLOSED:
                self._closed.popitem(last=False)
        session = await self.shut(sid, wait_timeout)
        self._open.pop(sid, None)
        return session
