"""A folder of this machine as a sandbox: for tests and for tools that are trusted.  It isolates nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from slime.agent.sandbox.protocol import ExecResult, FileContent, SandboxError, checked
from slime.utils import env as environment

logger = logging.getLogger(__name__)

KILL_WAIT_S = 10.0
"""For the kernel to end a killed process."""


class LocalSandbox:
    """A folder of this machine, deleted at the end, where commands run as the user of this process.

    ``user`` is ignored.  Paths of ``write_file`` and ``read_file`` are paths of this machine; relative ones lie in
    the folder.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None

    @property
    def sandbox_id(self) -> str:
        """The folder's name."""
        return "" if self.folder is None else self.folder.name

    async def __aenter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="slime-sandbox-"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

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
        """Run a shell command in the folder.  Raises SandboxError after ``timeout`` seconds."""
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            cmd,
            cwd=self._entered(),
            env={**environment.copy(), **(env or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout)
        except TimeoutError as error:
            raise SandboxError(f"A command did not end within {timeout:.0f} s: {cmd[:300]!r}.") from error
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await _reap(process)
        result = ExecResult(process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace"))
        return checked(result, cmd, check)

    async def write_file(self, path: str, content: FileContent, *, user: str = "root") -> None:
        """Write a file; folders on the way are made."""
        target = self._entered() / path
        target.parent.mkdir(parents=True, exist_ok=True)
        data = content.read_bytes() if isinstance(content, Path) else content
        target.write_bytes(data.encode() if isinstance(data, str) else data)

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """Return the text of a file; "" when it does not exist."""
        try:
            return (self._entered() / path).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise SandboxError(f"{path} cannot be read: {error}.") from error

    def _entered(self) -> Path:
        if self.folder is None:
            raise SandboxError("The sandbox was not entered; use it with 'async with'.")
        return self.folder


async def _reap(process: asyncio.subprocess.Process) -> None:
    """Wait for a killed process to be gone."""
    try:
        await asyncio.wait_for(process.wait(), KILL_WAIT_S)
    except TimeoutError:  # stuck in the kernel; nobody needs it any more
        logger.warning("Process %d of a sandbox outlives its SIGKILL.", process.pid)
