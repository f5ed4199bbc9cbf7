"""What slime asks of a sandbox.  Any class with these methods is one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self, runtime_checkable

from slime.utils.errors import ProcessError

FileContent = str | bytes | Path
"""Text, bytes, or a file of this machine whose bytes are meant."""


class ExecResult(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class SandboxError(ProcessError):
    """The sandbox cannot be reached, or a command that had to succeed did not."""


@runtime_checkable
class Sandbox(Protocol):
    """A machine of its own, from ``async with`` to its end."""

    @property
    def sandbox_id(self) -> str:
        """Names the sandbox in logs; empty before it is entered."""

    async def __aenter__(self) -> Self:
        """Start it."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Destroy it."""

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
        """Run a shell command.

        Args:
            cmd: a line of bash.
            user: who runs it.
            env: variables beside those of the sandbox.
            timeout: deadline in seconds.
            check: raise when the command fails.
            idempotent: whether it may be sent again when the connection broke.

        Raises:
            SandboxError: the sandbox did not answer in time, or ``check`` and the exit code is not 0.
        """

    async def write_file(self, path: str, content: FileContent, *, user: str = "root") -> None:
        """Write a file; folders on the way are made."""

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """A file's text.  SandboxError when it does not exist."""


def checked(result: ExecResult, cmd: str, check: bool) -> ExecResult:
    """``result``; SandboxError when it had to be a success and is none."""
    if check and result.code != 0:
        output = (result.err or result.out).strip()[-1000:]
        raise SandboxError(f"A command ended with code {result.code}: {cmd[:300]!r} said {output!r}.")
    return result
