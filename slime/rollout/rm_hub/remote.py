"""``--rm-type remote_rm``: another server gives the reward."""

from __future__ import annotations

import asyncio
import logging
import random
import weakref
from argparse import Namespace
from typing import Any

import aiohttp

from slime.utils.errors import ConfigError, EngineError
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
TIMEOUT_S = 120.0
MAX_WAIT_S = 30.0

_sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = weakref.WeakKeyDictionary()


def _session() -> aiohttp.ClientSession:
    """The client of the running event loop, shared by all its requests."""
    loop = asyncio.get_running_loop()
    session = _sessions.get(loop)
    if session is None or session.closed:
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            trust_env=False,
        )
        _sessions[loop] = session
    return session


async def close_remote_rm_client() -> None:
    """Close the client of the running event loop."""
    session = _sessions.pop(asyncio.get_running_loop(), None)
    if session is not None:
        await session.close()


async def remote_rm(args: Namespace, sample: Sample, max_retries: int = 10) -> Any:
    """The JSON that ``--rm-url`` answers to ``{"prompt", "response", "label"}``.

    Tried ``max_retries`` times, waiting 1, 2, 4 ... at most 30 seconds plus up to one random second in between.

    Raises:
        EngineError: the last attempt failed too.
    """
    url = getattr(args, "rm_url", None)
    if not url:
        raise ConfigError("--rm-type is remote_rm and --rm-url is empty; it must be the address of a reward server.")
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    for attempt in range(max_retries):
        try:
            async with _session().post(url, json=payload) as response:
                response.raise_for_status()
                return await response.json(content_type=None)
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
            if attempt + 1 >= max_retries:
                raise EngineError(
                    f"The reward server {url} failed {max_retries} times; last: {type(error).__name__}: {error}. "
                    "Look at its log, or change --rm-url."
                ) from error
            wait_s = min(2.0**attempt, MAX_WAIT_S) + random.random()
            logger.warning("Reward server %s: %s; trying again in %.1f s", url, error or type(error).__name__, wait_s)
            await asyncio.sleep(wait_s)
    raise ConfigError(f"max_retries is {max_retries}; it must be at least 1.")
