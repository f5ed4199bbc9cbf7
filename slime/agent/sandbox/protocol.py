"""The protocol of sandboxes, and commands in one that outlive a connection."""

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
"""Text, bytes, or a file of this machine whose bytes are meant."""


class ExecResult(NamedTuple):
    """Exit code and output of a command."""

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
    ) -> tuple[int, str, str]:
        """Run a shell command; returns ``(exit code, output, errors)``, plain or as an ``ExecResult``.

        Args:
            idempotent: whether it may be sent again when the connection broke.

        Raises:
            SandboxError: the sandbox did not answer in time, or ``check`` and the exit code is not 0.
        """

    async def write_file(self, path: str, content: FileContent, *, user: str = "root") -> None:
        """Write a file; folders on the way are made."""

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """Return the text of a file; "" when it does not exist."""


def checked(result: ExecResult, cmd: str, check: bool) -> ExecResult:
    """Return ``result``, or raise SandboxError when ``check`` is set and the command failed."""
    if check and result.code != 0:
        output = (result.err or result.out).strip()[-1000:]
        raise SandboxError(f"A command ended with code {result.code}: {cmd[:300]!r} said {output!r}.")
    return result


# Long commands: a connection lives shorter than an agent, so a job is started and then polled


logger = logging.getLogger(__name__)

EXIT_TIME_BUDGET_EXCEEDED = -1
"""Code of a job that was ended because its time was up."""
EXIT_UNKNOWN = 1
"""Code of a job that wrote over its own."""
AGENT_USER = "agent"
POLL_FIRST_S, POLL_LAST_S = 0.2, 5.0
POLL_TIMEOUT_S = 60.0
MAX_LOST_POLLS = 5
"""Polls in a row that may fail before the sandbox counts as gone."""
MAX_OUTPUT_BYTES = 10_000_000
FAILED_OUTPUT_BYTES = 4000
"""Kept of a failed job's output when nobody asked for it."""
SPAWN_CHECK_S = 1.0
"""For a job whose start got no answer to show that it runs."""


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
    """Run ``cmd`` detached and wait for its end; returns ``(exit code, output)``.

    Args:
        time_budget_sec: then the job and its children are killed, and the code is ``EXIT_TIME_BUDGET_EXCEEDED``.
        tag: names the job's files; two jobs at a time need two tags.
        out_file: gets standard output and error; by default a file in /tmp.
        want_output: give the end of that file; else "", or a few last lines when the job failed.

    Raises:
        SandboxError: the sandbox is gone.
    """
    # A name that no other job had: what is under it was written by this one.
    stem = f"/tmp/slime-job-{tag}-{uuid.uuid4().hex[:8]}"
    out_file = out_file or f"{stem}.out"
    script, code_file, group_file = f"{stem}.sh", f"{stem}.code", f"{stem}.pgid"
    lines = ["#!/bin/bash", *(f"export {name}={shlex.quote(value)}" for name, value in (env or {}).items())]
    lines += [f"cd {shlex.quote(workdir)} || exit 97"] if workdir else []
    await sb.write_file(script, "\n".join([*lines, cmd, ""]), user=user)
    wrapper = f"bash {script} > {shlex.quote(out_file)} 2>&1 < /dev/null; echo $? > {code_file}.tmp; "
    wrapper += f"mv {code_file}.tmp {code_file}"
    # setsid makes the job a process group of its own, which can be killed as a whole.
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
    """Start a job once.  When the answer is lost, look whether it runs; a second start would be a second job."""
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
                # What is no exit status was written there by the job itself.
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
    """Make the user ``agent``, to whom ``workdir`` belongs: agents refuse to work unasked as root."""
    folder = shlex.quote(workdir)
    make = f"id -u {AGENT_USER} > /dev/null 2>&1 || useradd -m -s /bin/bash {AGENT_USER}"
    # git refuses to work in another user's folder.
    own = f"mkdir -p {folder} && chown -R {AGENT_USER} {folder}"
    trust = f"(command -v git > /dev/null && git config --system --add safe.directory {folder}) || true"
    await sb.exec(f"{make}; {own}; {trust}", user="root", timeout=300, check=True)
