"""Sessions of an adapter: admission of turns, and shutdown with turns in flight."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

DEFAULT_MAX_NEW_TOKENS = 4096
_RANGES = {
    "temperature": (0.0, 1e3),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "top_k": (-1, 2**31 - 1),
}
"""(minimum, maximum) of each sampling parameter of a request; integer bounds accept integers only."""
MAX_NEW_TOKENS = 2**31 - 1
MAX_STOPS, MAX_STOP_CHARS = 32, 1024
POLL_S = 0.05
CANCEL_WAIT_S = 5.0
"""Seconds for cancelled requests to send their errors."""
REMEMBERED_CLOSED = 100_000
"""Number of closed sessions to remember, so that late requests to them get 503 instead of 401."""


class AdapterError(Exception):
    """An error to be sent as the answer to a request, in the protocol's format."""

    def __init__(self, status: int, message: str, *, code: str | None = None, may_retry: bool = True) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        """More specific error code, for protocols that have one."""
        self.may_retry = may_retry
        """False tells the official clients not to retry."""


@dataclass(kw_only=True)
class Session:
    """One or more conversations of one agent."""

    sid: str = ""
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    sampling_overrides: dict[str, Any] = field(default_factory=dict)
    max_context_tokens: int = 0
    """Maximum tokens of prompt and response of a turn together; 0: the engine's limit."""
    num_turns: int = 0
    """Turns begun, including those in flight."""
    is_closed: bool = False
    hit_context_limit: bool = False
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a thread reads a request, so that a session occupies at most one thread."""
    in_flight: set[asyncio.Task[Any]] = field(default_factory=set)

    def sampling_params(
        self, body: Mapping[str, Any], num_prompt: int, max_token_keys: Sequence[str], stop_keys: Sequence[str]
    ) -> dict[str, Any]:
        """Merge the session's defaults, the request's parameters and the session's overrides, in this order.

        Two parameters are combined instead: ``max_new_tokens`` is the smallest of all limits, and the request's stop
        strings are added to the default ones.

        Raises:
            AdapterError: a parameter has the wrong type or is out of range, or the prompt leaves no room (400).
        """
        params = dict(self.sampling_defaults)
        params |= {key: _in_range(key, body[key]) for key in _RANGES if body.get(key) is not None}
        limit_key = next((key for key in max_token_keys if body.get(key) is not None), "max_new_tokens")
        settings = (self.sampling_defaults, self.sampling_overrides)
        limits = [body.get(limit_key), *(each.get("max_new_tokens") for each in settings)]
        stop = next((body[key] for key in stop_keys if body.get(key)), None)
        if stop is not None:
            given = _stops(stop)
            own = params.get("stop") or []
            params["stop"] = [*given, *([own] if isinstance(own, str) else own)]
        params |= self.sampling_overrides
        known_limits = [limit for limit in limits if limit is not None]
        if any(type(limit) is not int or not 0 < limit <= MAX_NEW_TOKENS for limit in known_limits):
            raise AdapterError(400, f"{limit_key} is {known_limits[0]!r}; it must be a positive integer.")
        params["max_new_tokens"] = min(known_limits, default=DEFAULT_MAX_NEW_TOKENS)
        if self.max_context_tokens:
            room = self.max_context_tokens - num_prompt
            if room <= 0:
                self.hit_context_limit = True
                # Agents look for this wording to compact their history.
                message = f"prompt is too long: {num_prompt} tokens > {self.max_context_tokens} maximum"
                raise AdapterError(400, message, code="context_length_exceeded")
            params["max_new_tokens"] = min(params["max_new_tokens"], room)
        return params


class SessionBook:
    """The sessions of one adapter.  Invariant: an id is open, closed or unknown; a closed id may be opened again."""

    def __init__(self, max_turns_per_sid: int | None = None) -> None:
        self.max_turns_per_sid = max_turns_per_sid
        self._open: dict[str, Session] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, session: Session) -> None:
        """Open a session; raise ValueError if its id is already open."""
        with self._lock:
            if session.sid in self._open:
                raise ValueError(f"Session {session.sid!r} is open already; finish or drop it before it opens again.")
            self._closed.pop(session.sid, None)
            self._open[session.sid] = session

    def admit(self, sid: str) -> Session:
        """Count a new turn of the session, and return the session.

        Raises:
            AdapterError: the session was not opened by the job (401), is closed (503) or has used its turns (429).
        """
        with self._lock:
            session = self._open.get(sid)
            if session is None and sid not in self._closed:
                message = "The API key of a request names its session, and the job has not opened this session."
                raise AdapterError(401, message, code="invalid_api_key", may_retry=False)
            if session is None or session.is_closed:
                raise AdapterError(503, f"Session {sid!r} is closed.", may_retry=False)
            if self.max_turns_per_sid is not None and session.num_turns >= self.max_turns_per_sid:
                message = f"Session {sid!r} has used its {self.max_turns_per_sid} turns."
                raise AdapterError(429, message, code="turn_limit", may_retry=False)
            session.num_turns += 1
            return session

    async def shut(self, sid: str, wait_timeout: float) -> Session | None:
        """Refuse further requests, wait for those in flight, cancel the rest; return None if ``sid`` is not open."""
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
        """Shut and remove the session; return None if another caller already did."""
        with self._lock:
            if sid not in self._open or sid in self._closed:
                return None
            self._closed[sid] = None
            while len(self._closed) > REMEMBERED_CLOSED:
                self._closed.popitem(last=False)
        session = await self.shut(sid, wait_timeout)
        self._open.pop(sid, None)
        return session


def _in_range(key: str, value: Any) -> float:
    low, high = _RANGES[key]
    kinds = (int,) if isinstance(low, int) else (int, float)
    if type(value) not in kinds or not low <= value <= high or (key == "top_k" and value == 0):
        raise AdapterError(400, f"{key} is {str(value)[:200]!r}; it must be a number from {low:g} to {high:g}.")
    number: float = value
    return number


def _stops(stop: Any) -> list[str]:
    given = [stop] if isinstance(stop, str) else stop
    is_list = isinstance(given, list) and all(isinstance(one, str) for one in given)
    if not is_list or len(given) > MAX_STOPS or any(len(one) > MAX_STOP_CHARS for one in given):
        message = f"at most {MAX_STOPS} texts of at most {MAX_STOP_CHARS} characters"
        raise AdapterError(400, f"The stop strings are {str(stop)[:200]}; give {message}.")
    texts: list[str] = given
    return texts
