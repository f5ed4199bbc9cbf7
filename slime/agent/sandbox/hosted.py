"""The base class of sandboxes hosted by a service: deadlines, retries, and settings from environment variables."""

from __future__ import annotations

import argparse
import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, TypeVar

from slime.agent.sandbox.protocol import SandboxError
from slime.flags.kinds import non_negative_float
from slime.utils.env import agent_setting
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_LIFETIME_S = 3600
DEFAULT_RPC_RETRIES = 3
RPC_TIMEOUT_S = 60.0
"""Deadline in seconds of a call to the service other than a command."""
CREATE_TIMEOUT_S = 600.0
RETRY_WAIT_S = 1.0


class HostedSandbox(ABC):
    """A sandbox hosted by a service, created from an image.

    Args:
        image: Name of the image at the service.
        timeout: Lifetime in seconds, after which the service destroys the sandbox; defaults to
            ``SLIME_AGENT_SANDBOX_LIFETIME_SEC`` or 3600.
        rpc_retries: Retries of a call that failed or timed out; defaults to ``SLIME_AGENT_SANDBOX_RPC_RETRIES`` or 3.
    """

    def __init__(self, image: str, *, timeout: float | None = None, rpc_retries: int | None = None) -> None:
        self.image = image
        self.timeout = timeout if timeout is not None else _number("SANDBOX_LIFETIME_SEC", DEFAULT_LIFETIME_S)
        retries = rpc_retries if rpc_retries is not None else _number("SANDBOX_RPC_RETRIES", DEFAULT_RPC_RETRIES)
        self.rpc_retries = int(retries)
        self._box: Any = None

    @property
    @abstractmethod
    def sandbox_id(self) -> str:
        """The service's id; empty before the sandbox is entered."""

    @abstractmethod
    async def _destroy(self) -> None:
        """Destroy the sandbox at the service."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._box is None:
            return
        try:
            await self._retried("kill", self._destroy, RPC_TIMEOUT_S)
        except SandboxError as failure:
            # Its lifetime ends it anyway; the agent's work must not be lost because of this.
            logger.warning("Sandbox %s was not destroyed: %s", self.sandbox_id, failure)

    def _entered(self) -> Any:
        if self._box is None:
            raise SandboxError("The sandbox was not entered; use it with 'async with'.")
        return self._box

    async def _retried(
        self, what: str, call: Callable[[], Awaitable[T]], timeout_s: float, *, once: bool = False
    ) -> T:
        attempts = 1 if once else self.rpc_retries + 1
        for attempt in range(1, attempts + 1):
            try:
                return await asyncio.wait_for(call(), timeout_s)
            except (ConfigError, SandboxError):
                raise
            except Exception as error:  # the services' clients have no common error class
                if attempt == attempts:
                    raise SandboxError(
                        f"Sandbox {self.sandbox_id or self.image}: {what} failed {attempt} time(s), each within "
                        f"{timeout_s:.0f} s; last: {type(error).__name__}: {error}."
                    ) from error
                logger.info("Sandbox %s: %s failed, trying again: %r", self.sandbox_id, what, error)
                await asyncio.sleep(RETRY_WAIT_S * attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")


def _number(name: str, default: float) -> float:
    text = agent_setting(name)
    try:
        return default if text is None else non_negative_float(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"The environment variable SLIME_AGENT_{name}: {error}.") from error
