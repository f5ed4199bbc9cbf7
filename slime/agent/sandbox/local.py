"""A sandbox on this machine: commands see the system, Python and a folder, in memory."""

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
    """Commands of bash in isolation on this machine; all processes and files end with it.

    They run in ``folder``, under a user without rights, without network and without the variables of this process.
    ``user`` is ignored.  Paths of ``write_file`` and ``read_file`` are the sandbox's; relative ones lie in ``folder``.

    Args:
        reach: a URL that commands reach, at ``address_of`` it.
        is_unsafe: isolate nothing (``--unsafe-local-sandbox``).
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
        """Return the URL at which commands reach that of ``reach``."""
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
        """Run a shell command in the folder and wait for its end; what it started in the background goes on.

        Raises:
            SandboxError: it passed ``timeout`` or another limit, and was killed with what it started.
        """
        ended = await self._run(["bash", "-c", cmd], repr(cmd[:300]), env=env, timeout_s=timeout)
        code = ended.code if ended.code >= 0 else 128 - ended.code
        result = ExecResult(code, ended.out.decode(errors="replace"), ended.err.decode(errors="replace"))
        return checked(result, cmd, check)

    async def write_file(self, path: str, content: FileContent, *, user: str = "root") -> None:
        """Write a file; folders on the way are made."""
        data = await asyncio.to_thread(content.read_bytes) if isinstance(content, Path) else content
        stdin = data.encode() if isinstance(data, str) else data
        ended = await self._run(["bash", "-c", _WRITE, "write", str(path)], f"write {path}", stdin=stdin)
        if ended.code != 0:
            raise SandboxError(f"{path} cannot be written: {ended.err.decode(errors='replace').strip()[-300:]}.")

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """Return the text of a file; "" when it does not exist."""
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
