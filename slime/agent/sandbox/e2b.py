"""Sandboxes of E2B or a compatible service.  The package ``e2b`` is imported when a sandbox starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from slime.agent.sandbox import hosted
from slime.agent.sandbox.protocol import ExecResult, FileContent, SandboxError, checked
from slime.utils.env import agent_setting
from slime.utils.errors import ConfigError


class E2BSandbox(hosted.HostedSandbox):
    """A sandbox of E2B, created from a template or an image.

    Args:
        image: E2B template, or image name if ``image_metadata_key`` is set.
        timeout, rpc_retries: See ``HostedSandbox``.
        image_metadata_key: Metadata key by which the service selects the image; defaults to
            ``SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY``.
        size: Metadata entry ``size``; defaults to ``SLIME_AGENT_E2B_SANDBOX_SIZE``.
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
        super().__init__(image, timeout=timeout, rpc_retries=rpc_retries)
        self.image_metadata_key = image_metadata_key or agent_setting("SANDBOX_IMAGE_METADATA_KEY")
        self.size = size or agent_setting("E2B_SANDBOX_SIZE")

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
        self._box = await self._retried("create", lambda: service.create(**options), hosted.CREATE_TIMEOUT_S)
        return self

    async def _destroy(self) -> None:
        await self._box.kill()

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
                if type(error).__name__ == "TimeoutException":  # no retry: it used up its time
                    raise SandboxError(f"A command did not end within {timeout:g} s: {cmd[:300]!r}.") from error
                if not hasattr(error, "exit_code"):
                    raise
                done = error  # for exit codes other than 0, E2B raises an error with the fields of a result
            return ExecResult(int(done.exit_code), done.stdout or "", done.stderr or "")

        result = await self._retried(f"exec {cmd[:80]!r}", run, timeout + hosted.RPC_TIMEOUT_S, once=not idempotent)
        return checked(result, cmd, check)

    async def write_file(self, path: str, content: FileContent, *, user: str = "root") -> None:
        data = content.read_bytes() if isinstance(content, Path) else content
        files = self._entered().files
        deadline_s = hosted.RPC_TIMEOUT_S + len(data) / 1e6  # allow for large tarballs at 1 MB/s
        await self._retried(f"write {path}", lambda: files.write(path, data, user=user), deadline_s)

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """Return the text of a file, or "" if it does not exist."""
        files = self._entered().files

        async def read() -> str:
            try:
                return str(await files.read(path, user=user))
            except Exception as error:
                # E2B's FileNotFoundException (NotFoundException in older clients), by name to avoid importing e2b.
                if type(error).__name__ in ("FileNotFoundException", "NotFoundException"):
                    return ""
                raise

        return await self._retried(f"read {path}", read, hosted.RPC_TIMEOUT_S)
