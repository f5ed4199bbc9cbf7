"""Rewards from a server (``--rm-url``), and retries for servers that grade."""

from __future__ import annotations

import asyncio
import logging
import random
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiohttp

from slime.flags.reward import RewardConfig
from slime.utils.errors import ConfigError, GraderError
from slime.utils.http_utils import separate_sessions
from slime.utils.redaction import redacted_text
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
TIMEOUT_S = 120.0
"""Timeout of one request to a reward server."""
MAX_WAIT_S = 30.0
"""Longest wait between two attempts, without the random part."""

_sessions = separate_sessions(max_connections=MAX_CONNECTIONS, timeout_s=TIMEOUT_S)
Answer = TypeVar("Answer")


async def remote_rm(args: Namespace, sample: Sample, max_retries: int = 10) -> Any:
    """Post ``{"prompt", "response", "label"}`` to ``--rm-url`` and return its JSON answer.

    Raises:
        ConfigError: ``--rm-url`` is empty.
        GraderError: ``max_retries`` attempts failed (see ``ask_patiently``).
    """
    url = RewardConfig.of(args).rm_url
    if not url:
        raise ConfigError("--rm-type is remote_rm, but --rm-url is empty; it must be the address of a reward server.")
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}

    async def ask() -> Any:
        async with _sessions.current().post(url, json=payload) as response:
            response.raise_for_status()
            reward = await response.json(content_type=None)
        if not isinstance(reward, int | float | dict):
            raise UnusableAnswer(f"it answered {str(reward)[:200]!r}, which is neither a number nor an object")
        return reward

    return await ask_patiently(ask, server=f"reward server {redacted_text(url)}", max_attempts=max_retries)


class UnusableAnswer(Exception):
    """The answer of a reward server is unusable; another attempt may succeed."""


async def ask_patiently(attempt: Callable[[], Awaitable[Answer]], *, server: str, max_attempts: int) -> Answer:
    """Return the result of ``attempt``, retrying after 1, 2, 4, ... (at most 30) seconds plus up to 1 random second.

    Args:
        attempt: Sends one request.  ``UnusableAnswer``, ``ValueError`` and connection errors are retried.
        server: Name of the server for errors, without credentials.
        max_attempts: At least 1.

    Raises:
        GraderError: all attempts failed.
    """
    for number in range(1, max_attempts + 1):
        try:
            return await attempt()
        except (UnusableAnswer, aiohttp.ClientError, TimeoutError, ValueError) as error:
            text = str(error) if isinstance(error, UnusableAnswer) else f"{type(error).__name__}: {error}"
            problem = redacted_text(text)
            if number == max_attempts:
                # Drop a cause whose text needed redaction: a traceback would show it.
                raise GraderError(
                    f"The {server} failed {number} times; last: {problem}. Look at its log, or change --rm-url."
                ) from (error if problem == text else None)
        wait_s = min(2.0 ** (number - 1), MAX_WAIT_S) + random.random()
        logger.warning("The %s failed (%s); asking again in %.1f s", server, problem, wait_s)
        await asyncio.sleep(wait_s)
    raise ConfigError(f"max_attempts for the {server} is {max_attempts}; it must be at least 1.")
