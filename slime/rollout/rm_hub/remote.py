"""``--rm-type remote_rm``: another server gives the reward."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.flags.reward import reward_config
from slime.rollout.control_client import UnusableAnswer, ask_patiently, control_sessions
from slime.utils.errors import ConfigError
from slime.utils.types import Sample

MAX_CONNECTIONS = 64
TIMEOUT_S = 120.0

_sessions = control_sessions(max_connections=MAX_CONNECTIONS, timeout_s=TIMEOUT_S)


async def remote_rm(args: Namespace, sample: Sample, max_retries: int = 10) -> Any:
    """Post ``{"prompt", "response", "label"}`` to ``--rm-url`` and return its JSON answer.

    Raises:
        GraderError: ``max_retries`` attempts failed (see ``ask_patiently``).
    """
    url = reward_config(args).rm_url
    if not url:
        raise ConfigError("--rm-type is remote_rm and --rm-url is empty; it must be the address of a reward server.")
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}

    async def ask() -> Any:
        async with _sessions.current().post(url, json=payload) as response:
            response.raise_for_status()
            reward = await response.json(content_type=None)
        if not isinstance(reward, int | float | dict):
            raise UnusableAnswer(f"it answered {str(reward)[:200]!r}, which is neither a number nor an object")
        return reward

    return await ask_patiently(ask, server=f"reward server {url}", max_attempts=max_retries)
