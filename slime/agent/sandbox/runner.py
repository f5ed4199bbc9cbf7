"""Runs programs isolated from this machine and from the programs of other runners."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from slime.agent.sandbox.protocol import SandboxError
from slime.isolation.view import isolated_command, processes_can_be_limited, unsafe_command, view_for_programs

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""Seconds for the first isolated process to answer, on a machine with busy cores."""
KILL_WAIT_S = 10.0
"""Seconds for the kernel to end killed processes."""
CONNECT_TIMEOUT_S = 10.0
MAX_MESSAGE_BYTES = 100_000
"""Maximum size of a command with its environment; the kernel does not accept longer arguments either."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits for all programs of a runner together; ``cpu_s`` and ``output_bytes`` apply to each program."""

    memory_mib: int = 4096
    disk_mib: int = 1024
    processes: int = 256
    cpu_s: int = 3600
    output_bytes: int = 16 << 20
    """Limit for standard output and for standard error; a program that prints more is killed."""


class Ended(NamedTuple):
    """The end of a program."""

    code: int
    """Exit status; -N if signal N ended the program."""
    out: bytes
    err: bytes
    reason: str
    """The limit that ended the program; empty if none did."""


class IsolatedRunner:
    """Runs programs that see only the system, Python and an initially empty folder; all end with ``async with``.

    Programs cannot reach this machine's other files, processes, environment variables or network addresses.  They may
    leave processes and files behind for the runner's next programs.

    Args:
        reach: A URL that programs reach as http://127.0.0.1 with the same port.
        is_unsafe: Isolate nothing; limits still apply, and all processes still end with the runner.
    """

    def __init__(self, limits: Limits | None = None, *, reach: str | None = None, is_unsafe: bool = False) -> None:
        self.limits, self.reach, self.is_unsafe = limits or Limits(), reach, is_unsafe
        self.folder = Path(tempfile.gettempdir())
        self._control: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._relay: asyncio.Server | None = None
        self._relayed: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Start the first isolated process.

        Raises:
            ConfigError: this machine cannot isolate programs.
            SandboxError: the process did not start.
        """
        if self.is_unsafe:
            self.folder = Path(tempfile.mkdtemp(prefix="slime-sandbox-"))
        else:
            self.folder = Path("/tmp", f"slime-sandbox-{os.urandom(6).hex()}")
        mine, theirs = _socket_pair()
        view = view_for_programs(str(self.folder), disk_mib=self.limits.disk_mib)
        rlimits = {"fsize": self.limits.disk_mib << 20, "cpu": self.limits.cpu_s}
        if not self.is_unsafe and processes_can_be_limited():
            rlimits["nproc"] = self.limits.processes + 1
        url = urlsplit(self.reach or "")
        view = replace(
            view,
            limits=rlimits,
            memory_bytes=self.limits.memory_mib << 20,
            processes=self.limits.processes,
            ports=[url.port] if url.port and not self.is_unsafe else [],
            control=theirs.fileno(),
        )
        try:
            words = await asyncio.to_thread(unsafe_command if self.is_unsafe else isolated_command, view)
            self._process = await asyncio.create_subprocess_exec(
                *words, pass_fds=[theirs.fileno()], env={"LANG": "C.UTF-8"}, cwd="/",
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
        except BaseException:
            mine.close()
            raise
        finally:
            theirs.close()
        self._control = mine
        try:
            await self._greet(url.hostname or "127.0.0.1", url.port)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def run(
        self,
        argv: Sequence[str] | None,
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        limits: Mapping[str, int] | None = None,
    ) -> Ended:
        """Run a program in the folder until it ends.  Its background processes continue, unless it is killed.

        Args:
            argv: The program; None runs ``stdin`` as Python code, which cannot start processes or open sockets.
            timeout_s: Seconds after which the program is killed with everything it started.
            limits: rlimits of this program, by lower-case name.

        Raises:
            TimeoutError: the deadline passed.
            SandboxError: the sandbox has ended or was not entered, or the command is too long.
        """
        if self._control is None:
            raise SandboxError("The sandbox was not entered; use it with 'async with'.")
        order = {"argv": argv, "env": dict(env or {}), "cwd": str(self.folder), "limits": dict(limits or {})}
        message = json.dumps(order).encode()
        if len(message) > MAX_MESSAGE_BYTES:
            raise SandboxError(
                f"A command has {len(message)} bytes; at most {MAX_MESSAGE_BYTES} are allowed. Put it into a file."
            )
        job, theirs = _socket_pair()
        source = _sealed_file(stdin)
        outputs = [_Output(self.limits.output_bytes), _Output(self.limits.output_bytes)]
        try:
            given = [source, *(output.write_end for output in outputs), theirs.fileno()]
            try:
                await _send(self._control, message, given, timeout_s)
            except ConnectionError as error:
                raise SandboxError(f"The sandbox {self.folder.name} has ended: {error}.") from error
            finally:
                theirs.close()
                os.close(source)
                for output in outputs:
                    os.close(output.write_end)
            return await self._ended(job, outputs, timeout_s)
        finally:
            job.close()
            for output in outputs:
                output.close()

    async def _ended(self, job: socket.socket, outputs: list[_Output], timeout_s: float) -> Ended:
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        for output in outputs:
            output.listen(over)
        answer = asyncio.ensure_future(loop.sock_recv(job, 4096))
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait([answer, over], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not answer.done():
                job.shutdown(socket.SHUT_WR)  # the supervisor then kills it, and answers
                await asyncio.wait([answer], timeout=KILL_WAIT_S)
                if not answer.done():  # stuck in the kernel
                    answer.cancel()
                    logger.warning("A program in sandbox %s is still alive after SIGKILL.", self.folder.name)
        is_lost = answer.cancelled() or answer.exception() is not None or not answer.result()
        if is_lost and not over.done():
            raise SandboxError(f"The sandbox {self.folder.name} ended while a command ran in it.")
        for output in outputs:
            output.drain()
        facts: dict[str, Any] = {"code": -9, "reason": ""} if is_lost else json.loads(answer.result())
        limit = f"more than {self.limits.output_bytes} bytes of output"
        reason = limit if any(output.is_full for output in outputs) else str(facts["reason"])
        return Ended(int(facts["code"]), bytes(outputs[0].data), bytes(outputs[1].data), reason)

    async def _greet(self, host: str, port: int | None) -> None:
        assert self._control is not None and self._process is not None and self._process.stderr is not None
        loop = asyncio.get_running_loop()
        there = asyncio.Event()
        loop.add_reader(self._control, there.set)
        try:
            await asyncio.wait_for(there.wait(), START_TIMEOUT_S)
        except TimeoutError as error:
            raise SandboxError(f"A sandbox did not start within {START_TIMEOUT_S:.0f} s.") from error
        finally:
            loop.remove_reader(self._control)
        message, ends, _, _ = socket.recv_fds(self._control, 64, 1)
        if message != b"ready":
            said = await asyncio.wait_for(self._process.stderr.read(2000), KILL_WAIT_S)
            raise SandboxError(f"A sandbox did not start: {said.decode(errors='replace').strip()}")
        if ends:
            listener = socket.socket(fileno=ends[0])

            async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = asyncio.current_task()
                assert task is not None and port is not None
                self._relayed.add(task)
                task.add_done_callback(self._relayed.discard)
                await _relay(reader, writer, host, port)

            self._relay = await asyncio.start_server(relay, sock=listener)

    async def _close(self) -> None:
        if self._relay is not None:
            self._relay.close()
        for task in self._relayed:
            task.cancel()
        control, self._control = self._control, None
        if control is not None:
            with contextlib.suppress(OSError):  # it has already ended
                control.shutdown(socket.SHUT_RDWR)
            control.close()
        if self._process is not None:
            await _gone(self._process)
        if self.is_unsafe:
            shutil.rmtree(self.folder, ignore_errors=True)


async def _gone(process: asyncio.subprocess.Process) -> None:
    """Wait for a process whose socket was closed to end; kill it if it does not."""
    for _ in range(2):
        try:
            await asyncio.wait_for(process.wait(), KILL_WAIT_S)
            return
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    logger.warning("Process %d of a sandbox is still alive after SIGKILL.", process.pid)


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    """Forward a program's connection to ``host``, until both sides have closed."""
    try:
        there, back = await asyncio.wait_for(asyncio.open_connection(host, port), CONNECT_TIMEOUT_S)
    except (OSError, TimeoutError) as error:
        logger.info("A sandbox cannot reach %s:%d: %r", host, port, error)
        writer.close()
        return

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while chunk := await source.read(1 << 16):
                target.write(chunk)
                await target.drain()
            if not target.is_closing():
                target.write_eof()
        except ConnectionError:  # abort both sides: without an EOF the other side would wait
            writer.transport.abort()
            back.transport.abort()

    try:
        await asyncio.gather(copy(reader, back), copy(there, writer))
    finally:
        writer.close()
        back.close()


class _Output:
    def __init__(self, limit: int) -> None:
        self._end, self.write_end = os.pipe()
        os.set_blocking(self._end, False)
        self._limit = limit
        self._over: asyncio.Future[Any] | None = None
        self.data = bytearray()
        self.is_full = False

    def listen(self, over: asyncio.Future[Any]) -> None:
        """Start reading; ``over`` gets a result if the output exceeds the limit."""
        self._over = over
        asyncio.get_running_loop().add_reader(self._end, self._read)

    def drain(self) -> None:
        while self._read():
            pass

    def close(self) -> None:
        if self._over is not None:
            self._over.get_loop().remove_reader(self._end)
        os.close(self._end)

    def _read(self) -> bool:
        try:
            chunk = b"" if self.is_full else os.read(self._end, 1 << 16)
        except BlockingIOError:
            return False
        room = self._limit - len(self.data)
        self.data += chunk[:room]
        self.is_full = self.is_full or len(chunk) > room
        if (self.is_full or not chunk) and self._over is not None:
            self._over.get_loop().remove_reader(self._end)
            if self.is_full and not self._over.done():
                self._over.set_result(None)
        return bool(chunk)


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return a socket pair that preserves message boundaries; the first end is non-blocking."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.setblocking(False)
    return mine, theirs


async def _send(control: socket.socket, message: bytes, ends: list[int], timeout_s: float) -> None:
    """Send a message with file descriptors, waiting while the socket's buffer is full."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                socket.send_fds(control, [message], ends)
                return
            except BlockingIOError:
                await asyncio.sleep(0.01)


def _sealed_file(content: bytes) -> int:
    """Return a descriptor of a sealed, read-only file in memory."""
    end = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(end), "wb") as file:
        file.write(content)
    os.lseek(end, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(end, fcntl.F_ADD_SEALS, seals)
    return end
