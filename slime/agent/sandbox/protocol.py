"""The protocol of sandboxes, and long-running commands that outlive a connection."""

from __future__ import annotations

import asyncio
import logging
import re
import shlex
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self, runtime_checkable

from slime.utils.errors import ProcessError

FileContent = str | bytes | Path
"""Text, bytes, or the path of a file on this machine."""


class ExecResult(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


class SandboxError(ProcessError):
    """The sandbox cannot be reached, or a command that had to succeed failed."""


@runtime_checkable
class Sandbox(Protocol):
    """A separate machine, which exists for the duration of ``async with``."""

    @property
    def sandbox_id(self) -> str:
        """Name of the sandbox in logs; empty before it is entered."""

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
    ) -> tuple[int, str, str]:
        """Run a shell command; return ``(exit code, stdout, stderr)``, as a plain tuple or an ``ExecResult``.

        Args:
            timeout: Seconds until the command fails.
            check: Raise an error if the exit code is not 0.
            idempotent: Whether the command may be sent again after a broken connection.

        Raises:
            SandboxError: the sandbox did not answer in time, or ``check`` is set and the exit code is not 0.
        """

    async def write_file(self, path: str, content: FileContent, *, user: str = "root") -> None:
        """Write a file, creating its parent folders."""

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """Return the text of a file, or "" if it does not exist."""


def checked(result: ExecResult, cmd: str, check: bool) -> ExecResult:
    """Return ``result``, or raise SandboxError if ``check`` is set and the command failed."""
    if check and result.code != 0:
        output = (result.err or result.out).strip()[-1000:]
        raise SandboxError(f"A command ended with code {result.code}: {cmd[:300]!r} said {output!r}.")
    return result


# Long-running commands: an agent outlives a connection, so a job is started in the background and polled


logger = logging.getLogger(__name__)

EXIT_TIME_BUDGET_EXCEEDED = -1
"""Exit code of a job that was killed because its time was up."""
EXIT_UNKNOWN = 1
"""Exit code of a job that overwrote its exit code file."""
AGENT_USER = "agent"
POLL_FIRST_S, POLL_LAST_S = 0.2, 5.0
POLL_TIMEOUT_S = 60.0
MAX_LOST_POLLS = 5
"""Consecutive failed polls after which the sandbox counts as gone."""
MAX_OUTPUT_BYTES = 10_000_000
FAILED_OUTPUT_BYTES = 4000
"""Bytes of a failed job's output that are returned without ``want_output``."""
SPAWN_CHECK_S = 1.0
"""Seconds after which a job whose start was not answered must show that it runs."""


async def exec_and_wait(
    sb: Sandbox,
    *,
    cmd: str,
    time_budget_sec: float,
    tag: str,
    user: str = "root",
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    out_file: str | None = None,
    want_output: bool = False,
) -> tuple[int, str]:
    """Run ``cmd`` in the background and wait for its end; return ``(exit code, output)``.

    Args:
        time_budget_sec: Time after which the job and its children are killed, and the exit code is
            ``EXIT_TIME_BUDGET_EXCEEDED``.
        tag: Part of the names of the job's files.
        out_file: File for standard output and error; defaults to a file in /tmp.
        want_output: Return the last ``MAX_OUTPUT_BYTES`` of that file.  Otherwise the output is "" for exit code 0,
            and the last ``FAILED_OUTPUT_BYTES`` for a failed job.

    Raises:
        SandboxError: the sandbox is gone.
    """
    # A unique name, so that only this job has written the files.
    stem = f"/tmp/slime-job-{tag}-{uuid.uuid4().hex[:8]}"
    out_file = out_file or f"{stem}.out"
    script, code_file, group_file = f"{stem}.sh", f"{stem}.code", f"{stem}.pgid"
    lines = ["#!/bin/bash", *(f"export {name}={shlex.quote(value)}" for name, value in (env or {}).items())]
    lines += [f"cd {shlex.quote(workdir)} || exit 97"] if workdir else []
    await sb.write_file(script, "\n".join([*lines, cmd, ""]), user=user)
    wrapper = f"bash {script} > {shlex.quote(out_file)} 2>&1 < /dev/null; echo $? > {code_file}.tmp; "
    wrapper += f"mv {code_file}.tmp {code_file}"
    # setsid puts the job in a separate process group, which can be killed as a whole.
    start = f"setsid bash -c {shlex.quote(f'echo $$ > {group_file}; {wrapper}')} > /dev/null 2>&1 < /dev/null &"
    await _spawn(sb, start, group_file, user)
    deadline = time.monotonic() + time_budget_sec
    code = await _wait_for_code(sb, code_file, user, deadline)
    if code is None:
        kill = f"kill -TERM -- -$(cat {group_file}); sleep 1; kill -KILL -- -$(cat {group_file})"
        await sb.exec(f"({kill}) 2> /dev/null; true", user=user, timeout=POLL_TIMEOUT_S)
        logger.info("Sandbox %s: job %s was ended after %.0f s.", sb.sandbox_id, tag, time_budget_sec)
        code = EXIT_TIME_BUDGET_EXCEEDED
    if code == 0 and not want_output:
        return code, ""
    kept_bytes = MAX_OUTPUT_BYTES if want_output else FAILED_OUTPUT_BYTES
    try:
        read = f"tail -c {kept_bytes} {shlex.quote(out_file)}"
        _, output, _ = await sb.exec(read, user=user, timeout=POLL_TIMEOUT_S)
    except SandboxError as error:
        if want_output:
            raise
        output = f"(the output cannot be read: {error})"
    return code, output


async def _spawn(sb: Sandbox, start: str, group_file: str, user: str) -> None:
    """Start a job once.  If the answer is lost, check whether it runs: a second start would be a second job."""
    try:
        await sb.exec(start, user=user, timeout=POLL_TIMEOUT_S, check=True, idempotent=False)
    except SandboxError as error:
        logger.info("Sandbox %s: the start of a job was not answered: %s", sb.sandbox_id, error)
        await asyncio.sleep(SPAWN_CHECK_S)
        _, group, _ = await sb.exec(f"cat {group_file} 2> /dev/null || true", user=user, timeout=POLL_TIMEOUT_S)
        if not group.strip():
            raise


async def _wait_for_code(sb: Sandbox, code_file: str, user: str, deadline: float) -> int | None:
    wait_s, lost = POLL_FIRST_S, 0
    while True:
        try:
            _, said, _ = await sb.exec(f"cat {code_file} 2> /dev/null || true", user=user, timeout=POLL_TIMEOUT_S)
            lost = 0
            if code := said.strip():
                # Anything but an exit status was written there by the job itself.
                return int(code) if re.fullmatch("[0-9]{1,3}", code) else EXIT_UNKNOWN
        except SandboxError as error:
            lost += 1
            if lost >= MAX_LOST_POLLS:
                raise
            logger.info("Sandbox %s did not answer (%d in a row): %s", sb.sandbox_id, lost, error)
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        await asyncio.sleep(min(wait_s, left))
        wait_s = min(wait_s * 1.5, POLL_LAST_S)


async def ensure_agent_user(sb: Sandbox, workdir: str) -> None:
    """Create the user ``agent`` as owner of ``workdir``: agents refuse to work as root without confirmation."""
    folder = shlex.quote(workdir)
    make = f"id -u {AGENT_USER} > /dev/null 2>&1 || useradd -m -s /bin/bash {AGENT_USER}"
    # git refuses to work in a folder of another user.
    own = f"mkdir -p {folder} && chown -R {AGENT_USER} {folder}"
    trust = f"(command -v git > /dev/null && git config --system --add safe.directory {folder}) || true"
    await sb.exec(f"{make}; {own}; {trust}", user="root", timeout=300, check=True)
