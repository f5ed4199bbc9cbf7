"""Sandboxes of Daytona.

The package ``daytona`` is imported when a sandbox starts; it reads ``DAYTONA_API_KEY``, ``DAYTONA_API_URL`` and
``DAYTONA_TARGET``.
"""

from __future__ import annotations

import math
import posixpath
import shlex
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from slime.agent.sandbox import hosted
from slime.agent.sandbox.protocol import ExecResult, FileContent, SandboxError, checked
from slime.utils.errors import ConfigError


class DaytonaSandbox(hosted.HostedSandbox):
    """A sandbox of Daytona, created from a registry image or a snapshot.  Programs run as root by default.

    Args:
        image: Name of the image or snapshot.
        timeout, rpc_retries: See ``HostedSandbox``.
        is_snapshot: Whether ``image`` is the name of a snapshot.
    """

    def __init__(
        self, image: str, *, timeout: float | None = None, rpc_retries: int | None = None, is_snapshot: bool = False
    ) -> None:
        super().__init__(image, timeout=timeout, rpc_retries=rpc_retries)
        self.is_snapshot = is_snapshot
        self._client: Any = None

    @property
    def sandbox_id(self) -> str:
        """The service's id; empty before the sandbox is entered."""
        return "" if self._box is None else str(self._box.id)

    async def __aenter__(self) -> Self:
        try:
            import daytona
        except ImportError as error:
            raise ConfigError(
                "DaytonaSandbox needs the package daytona, which is not installed: pip install -e '.[daytona]'."
            ) from error
        facts: dict[str, Any] = {"os_user": "root", "ephemeral": True, "auto_stop_interval": 0}
        facts["ttl_minutes"] = max(math.ceil(self.timeout / 60), 1)
        if self.is_snapshot:
            params: Any = daytona.CreateSandboxFromSnapshotParams(snapshot=self.image, **facts)
        else:
            params = daytona.CreateSandboxFromImageParams(image=self.image, **facts)
        try:
            self._client = daytona.AsyncDaytona()
        except daytona.DaytonaError as error:
            raise ConfigError(f"DaytonaSandbox: {error}") from error
        limit_s = hosted.CREATE_TIMEOUT_S
        try:
            self._box = await self._retried("create", lambda: self._client.create(params, timeout=limit_s), limit_s)
        except BaseException:
            await self._client.close()
            raise
        return self

    async def __aexit__(self, *error: Any) -> None:
        try:
            await super().__aexit__(*error)
        finally:
            if self._client is not None:
                await self._client.close()

    async def _destroy(self) -> None:
        await self._box.delete(timeout=hosted.RPC_TIMEOUT_S)

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
        box = self._entered()
        words = ["bash", "-c", cmd] if user == "root" else ["su", user, "-s", "/bin/bash", "-c", cmd]
        # The service returns a single text, so standard error is appended after a mark.
        mark = uuid.uuid4().hex
        errors = f"/tmp/slime-errors-{mark}"
        line = f"{shlex.join(words)} 2> {errors}; code=$?; printf {mark}; cat {errors}; rm -f {errors}; exit $code"

        async def run() -> ExecResult:
            try:
                done = await box.process.exec(line, env=dict(env or {}), timeout=math.ceil(timeout))
            except Exception as error:
                if type(error).__name__ == "DaytonaProcessExecutionTimeoutError":  # no retry: it used up its time
                    raise SandboxError(f"A command did not end within {timeout:g} s: {cmd[:300]!r}.") from error
                raise
            out, _, err = done.result.partition(mark)
            return ExecResult(int(done.exit_code), out, err)

        limit_s = timeout + hosted.RPC_TIMEOUT_S
        return checked(await self._retried(f"exec {cmd[:80]!r}", run, limit_s, once=not idempotent), cmd, check)

    async def write_file(self, path: str, content: FileContent, *, user: str = "root") -> None:
        box = self._entered()
        data = content.read_bytes() if isinstance(content, Path) else content
        data = data.encode() if isinstance(data, str) else data
        if folder := posixpath.dirname(path):
            await self.exec(f"mkdir -p -- {shlex.quote(folder)}", user=user, check=True)
        deadline_s = hosted.RPC_TIMEOUT_S + len(data) / 1e6  # allow for large tarballs at 1 MB/s
        await self._retried(f"write {path}", lambda: box.fs.upload_file(data, path), deadline_s)
        if user != "root":
            await self.exec(f"chown {shlex.quote(user)} -- {shlex.quote(path)}", check=True)

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """Return the text of a file, or "" if it does not exist."""
        box = self._entered()

        async def read() -> str:
            try:
                return bytes(await box.fs.download_file(path)).decode(errors="replace")
            except Exception as error:
                if type(error).__name__ in ("DaytonaFileNotFoundError", "DaytonaNotFoundError"):
                    return ""
                raise

        return await self._retried(f"read {path}", read, hosted.RPC_TIMEOUT_S)
