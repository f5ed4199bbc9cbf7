"""E2B, or a compatible service, as a sandbox.  The package ``e2b`` is imported when a sandbox starts."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from slime.agent.sandbox.protocol import ExecResult, FileContent, SandboxError, checked
from slime.flags.kinds import non_negative_float
from slime.utils.env import agent_setting
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_LIFETIME_S = 3600
DEFAULT_RPC_RETRIES = 3
RPC_TIMEOUT_S = 60.0
"""Deadline of one call of the service that is not a command."""
CREATE_TIMEOUT_S = 600.0
RETRY_WAIT_S = 1.0


class E2BSandbox:
    """A sandbox of E2B, made from an image.

    Args:
        image: E2B's template, or an image's name when ``image_metadata_key`` is set.
        timeout: seconds after which the service destroys it; by default ``SLIME_AGENT_SANDBOX_LIFETIME_SEC`` or 3600.
        image_metadata_key: for services that choose the image by an entry of the sandbox's metadata; by default
            ``SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY``.
        rpc_retries: further attempts of a call whose connection broke; by default ``SLIME_AGENT_SANDBOX_RPC_RETRIES``
            or 3.
        size: entry ``size`` of the metadata; by default ``SLIME_AGENT_E2B_SANDBOX_SIZE``.
    """

    def __init__(
        self,
        image: str,
        *,
        timeout: float | None = None,
        image_metadata_key: str | None = None,
        rpc_retries: int | None = None,
        size: str | None = None,
    ) -> None:
        self.image = image
        self.timeout = timeout if timeout is not None else _number("SANDBOX_LIFETIME_SEC", DEFAULT_LIFETIME_S)
        self.image_metadata_key = image_metadata_key or agent_setting("SANDBOX_IMAGE_METADATA_KEY")
        retries = rpc_retries if rpc_retries is not None else _number("SANDBOX_RPC_RETRIES", DEFAULT_RPC_RETRIES)
        self.rpc_retries = int(retries)
        self.size = size or agent_setting("E2B_SANDBOX_SIZE")
        self._box: Any = None

    @property
    def sandbox_id(self) -> str:
        """The service's id; empty before the sandbox is entered."""
        return "" if self._box is None else str(self._box.sandbox_id)

    @staticmethod
    def _service() -> Any:
        try:
            from e2b import AsyncSandbox
        except ImportError as error:
            raise ConfigError("E2BSandbox needs the package e2b, which is not installed: pip install e2b.") from error
        return AsyncSandbox

    async def __aenter__(self) -> Self:
        service = self._service()
        options: dict[str, Any] = {"timeout": int(self.timeout)}
        metadata = {"size": self.size} if self.size else {}
        if self.image_metadata_key:
            metadata[self.image_metadata_key] = self.image
        else:
            options["template"] = self.image
        if metadata:
            options["metadata"] = metadata
        self._box = await self._retried("create", lambda: service.create(**options), CREATE_TIMEOUT_S)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._box is None:
            return
        try:
            await self._retried("kill", lambda: self._box.kill(), RPC_TIMEOUT_S)
        except SandboxError as failure:
            # It ends by its lifetime anyway; what the agent did must not be lost over this.
            logger.warning("Sandbox %s was not destroyed: %s", self.sandbox_id, failure)

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
        check: bool = False,
        idempotent: bool = True,
    ) -> ExecResult:

        async def run() -> ExecResult:
            try:
                done = await self._entered().commands.run(cmd, user=user, envs=dict(env or {}), timeout=timeout)
            except Exception as error:
                if type(error).__name__ == "TimeoutException":  # not again: it had its time
                    raise SandboxError(f"A command did not end within {timeout:g} s: {cmd[:300]!r}.") from error
                if not hasattr(error, "exit_code"):
                    raise
                done = error  # E2B raises when the code is not 0, with the fields of a result
            return ExecResult(int(done.exit_code), done.stdout or "", done.stderr or "")

        result = await self._retried(f"exec {cmd[:80]!r}", run, timeout + RPC_TIMEOUT_S, once=not idempotent)
        return checked(result, cmd, check)

    async def write_file(self, path: str, content: FileContent, *, user: str = "root") -> None:
        data = content.read_bytes() if isinstance(content, Path) else content
        files = self._entered().files
        deadline_s = RPC_TIMEOUT_S + len(data) / 1e6  # large tarballs: at least 1 MB/s
        await self._retried(f"write {path}", lambda: files.write(path, data, user=user), deadline_s)

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """Return the text of a file; "" when it does not exist."""
        files = self._entered().files

        async def read() -> str:
            try:
                return str(await files.read(path, user=user))
            except Exception as error:
                # E2B's FileNotFoundException, in older clients NotFoundException, known by name without the package.
                if type(error).__name__ in ("FileNotFoundException", "NotFoundException"):
                    return ""
                raise

        return await self._retried(f"read {path}", read, RPC_TIMEOUT_S)

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
            except Exception as error:  # the service's client has no common base of its errors
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
