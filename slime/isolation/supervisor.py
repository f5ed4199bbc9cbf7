"""The first isolated process: starts the host's jobs, reports how they ended, and kills everything at the end.

The host sends one message per job through a socket, with four descriptors: standard input, output and error, and the
job's socket.  The exit status is returned on the job's socket; if the host closes it, the job is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from slime.isolation import namespaces, seccomp

PR_SET_CHILD_SUBREAPER = 36
MESSAGE_BYTES = 1 << 18
WATCH_MS = 200
"""Milliseconds between checks of the memory and the number of all processes."""
DYING_S = 10.0
"""Longest wait in seconds for killed processes; one that hangs in the kernel is left behind."""
EXIT_NOT_STARTED = 127
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def set_limits(limits: dict[str, int]) -> None:
    """Set rlimits, by lower-case name, for this process and its children.  Limits are never raised."""
    for name, value in {"nofile": 1024, **limits, "core": 0}.items():
        kind = getattr(resource, f"RLIMIT_{name.upper()}")
        hard = resource.getrlimit(kind)[1]
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (allowed, allowed))


class Supervisor:
    """Runs the host's jobs until the host closes the control socket."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._control = socket.socket(fileno=spec["control"])
        self._memory_bytes, self._processes = spec["memory_bytes"], spec["processes"]
        self._ports = spec["ports"]
        self._jobs: dict[int, socket.socket] = {}
        self._killed: dict[int, str] = {}
        """Killed jobs, with the limit that all jobs together exceeded."""

    def serve(self) -> None:
        """Start jobs until the host hangs up, then kill everything that still runs."""
        namespaces.call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # keeps orphans as children without a namespace
        if not os.path.exists("/proc/self"):  # total usage cannot be measured: limit each process instead
            set_limits({"as": self._memory_bytes})
        woken, wake = os.pipe()
        for end in (woken, wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        listeners = [socket.create_server(("127.0.0.1", port)) for port in self._ports]
        socket.send_fds(self._control, [b"ready"], [listener.fileno() for listener in listeners])
        for listener in listeners:
            listener.close()
        while True:
            poller = select.poll()
            for end in (self._control.fileno(), woken, *(job.fileno() for job in self._jobs.values())):
                poller.register(end, select.POLLIN)
            ready = {end for end, _ in poller.poll(WATCH_MS)}
            if woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
            self._reap()
            for pid, job in list(self._jobs.items()):
                if job.fileno() in ready:  # the host never sends on it, so it has hung up
                    _kill_tree(pid)
            if self._control.fileno() in ready and not self._start():
                _kill_everything()
                _wait_for_the_dead()
                return
            self._watch()

    def _start(self) -> bool:
        message, ends, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 4)
        if not message:
            return False
        try:
            pid = os.fork()
        except BlockingIOError:
            answer = {"code": -signal.SIGKILL, "reason": f"{self._processes} processes that run already"}
            os.write(ends[3], json.dumps(answer).encode())
            pid = -1
        if pid == 0:
            _become_job(json.loads(message), ends)
        for end in ends[:3] if pid > 0 else ends:
            os.close(end)
        if pid > 0:
            self._jobs[pid] = socket.socket(fileno=ends[3])
        return True

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (job := self._jobs.pop(pid, None)) is not None:
                code, reason = os.waitstatus_to_exitcode(status), self._killed.pop(pid, "")
                with contextlib.suppress(OSError):  # the host has hung up
                    job.send(json.dumps({"code": code, "reason": reason if code < 0 else ""}).encode())
                job.close()

    def _watch(self) -> None:
        """Kill everything if total usage exceeds a limit; the kernel's limits apply to single processes only."""
        sizes = [size for pid in _descendants(os.getpid()) if (size := _resident_bytes(pid)) is not None]
        if sum(sizes) > self._memory_bytes:
            reason = f"more than {self._memory_bytes >> 20} MiB of memory"
        elif len(sizes) > self._processes:
            reason = f"more than {self._processes} processes"
        else:
            return
        self._killed = dict.fromkeys(self._jobs, reason)
        _kill_everything()


def _become_job(order: dict[str, Any], ends: list[int]) -> NoReturn:
    """Take over the descriptors and become the program; without argv, run standard input as Python code."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.setsid()
        for number, end in enumerate(ends[:3]):
            os.dup2(end, number)
        os.closerange(3, 4096)
        os.chdir(order["cwd"])
        set_limits(order["limits"])
        if order["argv"] is None:
            _run_python()
        namespaces.call(
            "prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
        )  # processes that detach themselves stay its descendants
        os.execvpe(order["argv"][0], order["argv"], order["env"])
    except OSError as error:
        os.write(2, f"{error}\n".encode())
    os._exit(EXIT_NOT_STARTED)


def _run_python() -> NoReturn:
    """Run Python code from standard input in this process, without access to other processes or sockets."""
    with open(0, "rb", closefd=False) as file:
        source = file.read().decode(errors="replace")
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding="utf-8", errors="replace", closefd=False)
        for number, mode in enumerate(("r", "w", "w"))
    )
    sys.argv[:] = ["program"]
    seccomp.install(only_threads=True)
    code = 0
    try:
        exec(compile(source, "program", "exec"), {"__name__": "__main__"})
    except BaseException as error:
        code = _exit_code(error)
        if code:
            with contextlib.suppress(BaseException):
                print(f"{type(error).__name__}: {error}".splitlines()[0][:300])
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    os._exit(code)


def _exit_code(error: BaseException) -> int:
    """Return the exit status with which Python ends after an error, ``sys.exit`` included."""
    if not isinstance(error, SystemExit):
        return 1
    return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)


def _kill_everything() -> None:
    if os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # the whole namespace, atomically
    else:
        _kill_tree(os.getpid())


def _wait_for_the_dead() -> None:
    """Wait until all killed processes are gone; this process is also the parent of detached ones."""
    deadline = time.monotonic() + DYING_S
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.005)
        except ChildProcessError:
            return


def _kill_tree(root: int) -> None:
    """Kill a process and its descendants; if it is this process, only the descendants."""
    me = os.getpid()
    stopped: set[int] = set()
    while new := {root, *_descendants(root)} - stopped - {me}:
        for pid in new:  # stop them first, so that they cannot start others
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if root != me:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(root, signal.SIGKILL)  # without /proc no descendants were found above


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{int(name)}/stat") as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def _resident_bytes(pid: int) -> int | None:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * PAGE_BYTES
    return None
