"""Short requests beside the stream of generation: aborts, loads, worker lists, rewards.

They have connections of their own.  In the pool of ``slime.utils.http_utils`` every connection may be held by a
running generation, and an abort that waits for one of these to end would wait for what it is there to stop.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import aiohttp

from slime.utils.errors import EngineError

CONTROL_TIMEOUT_S = 30.0


class LoopSessions:
    """One aiohttp session for each event loop, made on its first request: a connection belongs to its loop."""

    def __init__(self, *, max_connections: int, timeout_s: float) -> None:
        self._max_connections = max_connections
        self._timeout_s = timeout_s
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = (
            weakref.WeakKeyDictionary()
        )

    def current(self) -> aiohttp.ClientSession:
        """The session of the running loop.  Proxies of the environment are not used."""
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_connections),
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
                trust_env=False,
            )
            self._sessions[loop] = session
        return session

    async def close(self) -> None:
        """Close the session of the running loop; the next request opens a new one."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()


_control = LoopSessions(max_connections=0, timeout_s=CONTROL_TIMEOUT_S)


async def control_get(url: str) -> Any:
    """The JSON at ``url``.

    Raises:
        EngineError: no answer within ``CONTROL_TIMEOUT_S`` seconds, a status of 400 or more, or no JSON.
    """
    try:
        async with _control.current().get(url) as response:
            response.raise_for_status()
            return await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise EngineError(f"GET {url} failed: {type(error).__name__}: {error}. Is that server alive?") from error


async def control_post(url: str, payload: Any) -> None:
    """Post JSON; what is answered is of no interest.  Raises as ``control_get`` does."""
    try:
        async with _control.current().post(url, json=payload) as response:
            response.raise_for_status()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineError(f"POST {url} failed: {type(error).__name__}: {error}. Is that server alive?") from error


async def close_control_client() -> None:
    """Close the control connections of the running event loop."""
    await _control.close()
