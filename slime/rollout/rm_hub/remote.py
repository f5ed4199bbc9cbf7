"""``--rm-type remote_rm``: another server gives the reward."""

from __future__ import annotations

import asyncio
import logging
import random
from argparse import Namespace
from typing import Any

import aiohttp

from slime.flags.reward import reward_config
from slime.rollout.control_client import control_sessions
from slime.utils.errors import ConfigError, GraderError
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
TIMEOUT_S = 120.0
MAX_WAIT_S = 30.0

_sessions = control_sessions(max_connections=MAX_CONNECTIONS, timeout_s=TIMEOUT_S)


async def close_remote_rm_client() -> None:
    """Close the client of the running event loop."""
    await _sessions.close()


async def remote_rm(args: Namespace, sample: Sample, max_retries: int = 10) -> Any:
    """Post ``{"prompt", "response", "label"}`` to ``--rm-url`` and return its JSON answer.

    Tried ``max_retries`` times, waiting 1, 2, 4 ... at most 30 seconds plus up to one random second in between.

    Raises:
        GraderError: the last attempt failed too.
    """
    url = reward_config(args).rm_url
    if not url:
        raise ConfigError("--rm-type is remote_rm and --rm-url is empty; it must be the address of a reward server.")
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    for attempt in range(max_retries):
        try:
            async with _sessions.current().post(url, json=payload) as response:
                response.raise_for_status()
                reward = await response.json(content_type=None)
                if not isinstance(reward, int | float | dict):
                    raise ValueError(f"it answered {str(reward)[:200]!r}, which is neither a number nor an object")
                return reward
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            if attempt + 1 >= max_retries:
                raise GraderError(
                    f"The reward server {url} failed {max_retries} times; last: {type(error).__name__}: {error}. "
                    "Look at its log, or change --rm-url."
                ) from error
            wait_s = min(2.0**attempt, MAX_WAIT_S) + random.random()
            logger.warning("Reward server %s: %s; trying again in %.1f s", url, error or type(error).__name__, wait_s)
            await asyncio.sleep(wait_s)
    raise ConfigError(f"max_retries is {max_retries}; it must be at least 1.")
