"""Start one of our own modules as a child process, feed it its settings, keep its log, and end it with its tree.

A child cannot rely on its parent's clean-up: SIGKILL leaves no time for it.  So each process looks, once a second,
whether its parent is still the one that started it.  (The kernel's own parent-death signal fires when the *thread*
that forked ends, which kills servers that a short-lived thread started.)

Output goes to ``$TMPDIR/slime-UID/run-YYYYMMDD-HHMMSS-PID/engine_0_10.0.0.1_21000.XXXX.log``, which no other user
reads.  A run is a rollout manager and what it starts, on every node.  The folders of the last ``KEEP_RUNS`` runs stay;
older ones are removed when a run begins.  ``SLIME_LOG_DIR`` names another folder, in which nothing is ever removed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from slime.utils import env
from slime.utils.errors import ConfigError, DeadlineError, EngineDiedError
from slime.utils.files import own_folder, user_folder

logger = logging.getLogger(__name__)

PLUGINS = "SLIME_ENGINE_PLUGINS"
"""JSON: functions that an engine's processes call before they import SGLang, each an import path and its arguments."""
REPOSITORY = Path(__file__).parents[3]
LOG_TAIL_LINES = 60
LOG_TAIL_BYTES = 2**18
"""Read of a log, which a long run makes gigabytes long."""
OWNER_POLL_S = 1.0
KEEP_RUNS = 20
FIRST_ERROR = re.compile(r"^[\w.]*Error(: .*)?$", re.MULTILINE)
"""The last line of a Python traceback."""
PORT_TAKEN = re.compile(r"(address|port) (is )?already in use|is not available in \d+ seconds", re.IGNORECASE)
"""Said of a port by the kernel, and by SGLang (srt/utils/network.py)."""
STILL_WRITING_S = 6 * 3600.0
"""A run that wrote so recently may still go on, however many began after it."""


class ChildProcess:
    """A running child.  It dies with this process; its output goes to ``log_path``."""

    def __init__(
        self,
        module: str,
        settings: Mapping[str, Any],
        *,
        name: str,
        extra_environment: Mapping[str, str],
        without_variables: tuple[str, ...] = (),
    ) -> None:
        """Start ``python -m module`` and give it ``settings`` as JSON on its standard input."""
        self.name = name
        self.log_path = new_log_file(name)
        inherited = env.without_http_proxies()
        variables = {key: value for key, value in inherited.items() if key not in without_variables}
        # Libraries keep compiled code and locks at names that other users could take before them.
        variables |= {"TMPDIR": str(user_folder())} | dict(extra_environment)
        paths = [str(REPOSITORY), *variables.get("PYTHONPATH", "").split(os.pathsep)]
        variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(p for p in paths if p))
        variables["PYTHONUNBUFFERED"] = "1"
        with self.log_path.open("wb") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", module, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables,
                # A Ctrl-C on the terminal reaches the owner only, which ends its children in order.
                start_new_session=True,
            )
        logger.info("%s: process %d, log %s", name, self._popen.pid, self.log_path)
        try:
            assert self._popen.stdin is not None, "stdin was asked for as a pipe"
            self._popen.stdin.write(json.dumps(dict(settings)).encode())
            self._popen.stdin.close()
        except BrokenPipeError as error:
            raise EngineDiedError(self.describe_end() or f"{name} closed its input at once") from error

    @property
    def pid(self) -> int:
        """Process id of the child, the root of its tree."""
        return self._popen.pid

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def describe_end(self) -> str | None:
        """Return how the child ended, with the end of its log; None while it runs."""
        code = self._popen.poll()
        if code is None:
            return None
        return f"{self.name} {_how_ended(code)}\n{self.log_tail()}"

    def log_tail(self) -> str:
        """Return the last lines of the child's output, headed by the path of the whole, and the first error in it."""
        try:
            text = self._read_log()
        except OSError as error:
            return f"(its log {self.log_path} cannot be read: {error})"
        end = f"--- end of {self.log_path} ---\n" + "\n".join(text.splitlines()[-LOG_TAIL_LINES:])
        first = FIRST_ERROR.search(text)
        return end if first is None else f"{end}\n--- first error in it ---\n{first[0]}"

    def listens_at(self, port: int) -> bool:
        """Return True when the child, or a process that it started, listens at a port of this host."""
        try:
            sockets = [each for process in _family(self.pid) for each in process.net_connections("tcp")]
        except psutil.NoSuchProcess:  # one has just ended
            return False
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in sockets)

    def lost_port(self) -> bool:
        """Return True when the end of the log says that another process has a port of the child's."""
        try:
            return PORT_TAKEN.search(self._read_log()) is not None
        except OSError:  # ``log_tail`` says so
            return False

    def _read_log(self) -> str:
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - LOG_TAIL_BYTES))
            return log.read(LOG_TAIL_BYTES).decode(errors="replace")

    def stop(self, timeout_s: float = 10.0) -> None:
        """Kill the child and everything it started.

        Raises:
            DeadlineError: some process of the tree is still there after ``timeout_s`` seconds.
        """
        left = kill_tree(self.pid, timeout_s)
        if left:
            raise DeadlineError(f"{self.name}: processes {left} are still running {timeout_s:g} s after SIGKILL")
        self._popen.wait(timeout=timeout_s)


def read_settings() -> dict[str, Any]:
    """Read, in the child, the settings that the owner wrote."""
    return json.load(sys.stdin)


def owner_pid() -> int:
    """Return, in the child, the process that started it."""
    return int(sys.argv[1])


# Ends


def end_with_family(owner_pid: int, poll_s: float = OWNER_POLL_S) -> threading.Thread:
    """Kill this process and its descendants as soon as ``owner_pid`` is no longer its parent, or a child has failed.

    A child is one of ``multiprocessing``, started after this call.  Its parent may wait for it, or for its siblings,
    without end; so it ends too, and its own parent after it, up to the child of the owner, who reads how it ended.
    """
    children = _note_children()

    def watch() -> None:
        while os.getppid() == owner_pid:
            failed = [child for child in list(children) if child.exitcode]
            for child in failed:
                how = _how_ended(child.exitcode or 0)
                print(f"{child.name}, process {child.pid} of {os.getpid()}, {how}: its family ends", flush=True)
            if failed:
                break
            time.sleep(poll_s)
        kill_tree(os.getpid())

    thread = threading.Thread(target=watch, name="family-watch", daemon=True)
    thread.start()
    return thread


def _note_children() -> list[BaseProcess]:
    """Return a list that gets every process that ``multiprocessing`` starts here; its own leaves out the dead."""
    children: list[BaseProcess] = []
    start = getattr(BaseProcess.start, "__wrapped__", BaseProcess.start)  # of the process that forked this one

    @wraps(start)
    def noted(process: BaseProcess) -> None:
        start(process)
        children.append(process)

    BaseProcess.start = noted  # type: ignore[method-assign, assignment]
    return children


@contextmanager
def ending_family() -> Iterator[None]:
    """End this process and its descendants when the block raises, after the error is printed.

    Python would wait for the process's children first, which may wait for requests without end.
    """
    try:
        yield
    except Exception:  # the edge of the process
        traceback.print_exc()
        for process in _family(os.getpid())[1:]:
            _kill(process)
        sys.stdout.flush()
        os._exit(1)


def _how_ended(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"


def kill_tree(pid: int, timeout_s: float = 10.0) -> list[int]:
    """Kill ``pid`` and all its descendants (SIGKILL) and wait until they are gone.

    When ``pid`` is this process, it dies last and the call does not return.

    Returns:
        The processes that still existed after ``timeout_s`` seconds.
    """
    family = _family(pid)
    if not family:
        return []
    for process in family[1:]:
        _kill(process)
    if pid == os.getpid():
        os.kill(pid, signal.SIGKILL)
    _kill(family[0])
    deadline = time.monotonic() + timeout_s
    alive = family
    while (alive := [process for process in alive if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [process.pid for process in alive]


def _family(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants; empty when it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _runs(process: psutil.Process) -> bool:
    """Return False for a zombie too: its exit status is for its parent to read, and reading it here would lose it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


# Logs


@cache
def run_name() -> str:
    """Return the folder of this run: inherited from the process that began it, or of this process's own making."""
    return env.log_run() or f"run-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def new_log_file(name: str) -> Path:
    """Make an empty file for the output of ``name``."""
    folder = log_folder()
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    handle, path = tempfile.mkstemp(prefix=f"{safe}.", suffix=".log", dir=folder)
    os.close(handle)
    return Path(path)


def log_folder() -> Path:
    """Return the folder of this run's logs, made if it is not there; making it removes those of runs long past."""
    chosen = env.log_dir()
    if chosen is not None:
        try:
            Path(chosen).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"The environment variable SLIME_LOG_DIR is {chosen!r}, which cannot be a folder of logs "
                f"({error.strerror}); name another, or unset it."
            ) from error
        return Path(chosen)
    folder = user_folder() / run_name()
    is_new = not os.path.lexists(folder)
    own_folder(folder)
    if is_new:
        remove_old_runs(folder.parent)
    return folder


def remove_old_runs(base: Path, *, keep: int = KEEP_RUNS) -> None:
    """Remove all but the last ``keep`` runs under ``base``, unless one was written to within ``STILL_WRITING_S``."""
    runs = sorted((path for path in base.glob("run-*") if path.is_dir()), key=_last_write_s, reverse=True)
    for run in runs[keep:]:
        if time.time() - _last_write_s(run) >= STILL_WRITING_S:
            shutil.rmtree(run, ignore_errors=True)  # another run, starting now, may do the same


def _last_write_s(folder: Path) -> float:
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except FileNotFoundError:  # another run has removed it
        return 0.0
