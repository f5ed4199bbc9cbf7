"""A sandbox on this machine, in which commands see the system, Python and an in-memory folder."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from slime.agent.sandbox.protocol import ExecResult, FileContent, SandboxError, checked
from slime.agent.sandbox.runner import Ended, IsolatedRunner, Limits

FILE_TIMEOUT_S = 120.0
EXIT_MISSING = 44
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
_READ = f'[ -e "$1" ] || exit {EXIT_MISSING}; exec cat -- "$1"'


class LocalSandbox:
    """Runs bash commands in isolation on this machine; all its processes and files end with it.

    Commands run in ``folder`` as an unprivileged user, without network and without this process's environment
    variables.  ``user`` is ignored.  ``write_file`` and ``read_file`` take paths in the sandbox, relative to
    ``folder``.

    Args:
        reach: A URL that commands may reach, at the address given by ``address_of``.
        is_unsafe: Isolate nothing (``--unsafe-local-sandbox``).
    """

    def __init__(self, *, limits: Limits | None = None, reach: str | None = None, is_unsafe: bool = False) -> None:
        self._runner = IsolatedRunner(limits, reach=reach, is_unsafe=is_unsafe)
        self.folder: Path | None = None

    @property
    def sandbox_id(self) -> str:
        return "" if self.folder is None else self.folder.name

    async def __aenter__(self) -> Self:
        await self._runner.__aenter__()
        self.folder = self._runner.folder
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.__aexit__(kind, error, trace)

    def address_of(self, url: str) -> str:
        """Return the URL at which commands reach ``url``, which must be that of ``reach``."""
        return url if self._runner.is_unsafe else f"http://127.0.0.1:{urlsplit(url).port}"

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
        """Run a shell command in ``folder`` until it ends; its background processes continue.

        Raises:
            SandboxError: the command exceeded ``timeout`` or another limit and was killed with its children, or
                ``check`` is set and its exit code is not 0.
        """
        ended = await self._run(["bash", "-c", cmd], repr(cmd[:300]), env=env, timeout_s=timeout)
        code = ended.code if ended.code >= 0 else 128 - ended.code
        result = ExecResult(code, ended.out.decode(errors="replace"), ended.err.decode(errors="replace"))
        return checked(result, cmd, check)

    async def write_file(self, path: str, content: FileContent, *, user: str = "root") -> None:
        """Write a file, creating its parent folders."""
        data = await asyncio.to_thread(content.read_bytes) if isinstance(content, Path) else content
        stdin = data.encode() if isinstance(data, str) else data
        ended = await self._run(["bash", "-c", _WRITE, "write", str(path)], f"write {path}", stdin=stdin)
        if ended.code != 0:
            raise SandboxError(f"{path} cannot be written: {ended.err.decode(errors='replace').strip()[-300:]}.")

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """Return the text of a file, or "" if it does not exist."""
        ended = await self._run(["bash", "-c", _READ, "read", str(path)], f"read {path}")
        if ended.code == EXIT_MISSING:
            return ""
        if ended.code != 0:
            raise SandboxError(f"{path} cannot be read: {ended.err.decode(errors='replace').strip()[-300:]}.")
        return ended.out.decode(errors="replace")

    async def _run(
        self,
        argv: Sequence[str],
        what: str,
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float = FILE_TIMEOUT_S,
    ) -> Ended:
        variables = {
            "PATH": f"{os.path.dirname(sys.executable)}:{SYSTEM_PATH}",
            "HOME": str(self.folder),
            "USER": "sandbox",
            "LANG": "C.UTF-8",
            "TMPDIR": "/tmp",
        }
        try:
            ended = await self._runner.run(argv, stdin=stdin, env=variables | dict(env or {}), timeout_s=timeout_s)
        except TimeoutError as error:
            raise SandboxError(f"A command did not end within {timeout_s:g} s: {what}.") from error
        if ended.reason:
            raise SandboxError(f"A command was killed because of {ended.reason}: {what}.")
        return ended
