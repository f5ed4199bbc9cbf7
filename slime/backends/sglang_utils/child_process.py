"""Starts one of our modules as a child process, sends it its settings, keeps its log, and kills its process tree.

A child cannot rely on its parent to clean up, because SIGKILL leaves no time for it.  So each child checks once a
second whether its parent is still the process that started it.  (The kernel's parent-death signal fires when the
*thread* that forked ends, which would kill servers started by a short-lived thread.)

Output goes to ``$TMPDIR/slime-UID/run-YYYYMMDD-HHMMSS-PID/engine_0_10.0.0.1_21000.XXXX.log``, which other users cannot
read.  A run is a rollout manager and the processes it starts, on every node.  The folders of the last ``KEEP_RUNS``
runs are kept; older ones are removed when a run starts.  ``SLIME_LOG_DIR`` sets another folder, in which nothing is
ever removed.
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
"""JSON list of functions that an engine's processes call before importing SGLang: import paths and arguments."""
REPOSITORY = Path(__file__).parents[3]
LOG_TAIL_LINES = 60
LOG_TAIL_BYTES = 2**18
"""Bytes read from the end of a log, which may be gigabytes long."""
OWNER_POLL_S = 1.0
KEEP_RUNS = 20
FIRST_ERROR = re.compile(r"^[\w.]*Error(: .*)?$", re.MULTILINE)
"""The last line of a Python traceback."""
PORT_TAKEN = re.compile(r"(address|port) (is )?already in use|is not available in \d+ seconds", re.IGNORECASE)
"""Errors about a port from the kernel and from SGLang (srt/utils/network.py)."""
STILL_WRITING_S = 6 * 3600.0
"""A run that wrote this recently may still be running, even if newer runs exist."""


class ChildProcess:
    """A running child process.  It dies with this process; its output goes to ``log_path``."""

    def __init__(
        self,
        module: str,
        settings: Mapping[str, Any],
        *,
        name: str,
        extra_environment: Mapping[str, str],
        without_variables: tuple[str, ...] = (),
    ) -> None:
        """Start ``python -m module`` and send it ``settings`` as JSON on standard input."""
        self.name = name
        self.log_path = new_log_file(name)
        inherited = env.without_http_proxies()
        variables = {key: value for key, value in inherited.items() if key not in without_variables}
        # Libraries put compiled code and locks under predictable names that other users could occupy first.
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
                # Ctrl-C on the terminal reaches only the owner, which ends its children in order.
                start_new_session=True,
            )
        logger.info("Started %s: process %d, log %s", name, self._popen.pid, self.log_path)
        try:
            assert self._popen.stdin is not None, "stdin was asked for as a pipe"
            self._popen.stdin.write(json.dumps(dict(settings)).encode())
            self._popen.stdin.close()
        except BrokenPipeError as error:
            raise EngineDiedError(self.describe_end() or f"{name} closed its input at once") from error

    @property
    def pid(self) -> int:
        """Process id of the child, the root of its process tree."""
        return self._popen.pid

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def describe_end(self) -> str | None:
        """Return how the child ended, with the tail of its log; None while it runs."""
        code = self._popen.poll()
        if code is None:
            return None
        return f"{self.name} {_how_ended(code)}\n{self.log_tail()}"

    def log_tail(self) -> str:
        """Return the log's path, the last lines of the child's output, and the first error in it."""
        try:
            text = self._read_log()
        except OSError as error:
            return f"(its log {self.log_path} cannot be read: {error})"
        end = f"--- end of {self.log_path} ---\n" + "\n".join(text.splitlines()[-LOG_TAIL_LINES:])
        first = FIRST_ERROR.search(text)
        return end if first is None else f"{end}\n--- first error in it ---\n{first[0]}"

    def listens_at(self, port: int) -> bool:
        """Return True if the child or one of its descendants listens on a port of this host."""
        try:
            sockets = [each for process in _family(self.pid) for each in process.net_connections("tcp")]
        except psutil.NoSuchProcess:  # a process has just ended
            return False
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in sockets)

    def lost_port(self) -> bool:
        """Return True if the tail of the log says that another process has one of the child's ports."""
        try:
            return PORT_TAKEN.search(self._read_log()) is not None
        except OSError:  # ``log_tail`` reports it
            return False

    def _read_log(self) -> str:
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - LOG_TAIL_BYTES))
            return log.read(LOG_TAIL_BYTES).decode(errors="replace")

    def stop(self, timeout_s: float = 10.0) -> None:
        """Kill the child and all its descendants.

        Raises:
            DeadlineError: a process of the tree still exists after ``timeout_s`` seconds.
        """
        left = kill_tree(self.pid, timeout_s)
        if left:
            raise DeadlineError(f"{self.name}: processes {left} are still running {timeout_s:g} s after SIGKILL")
        self._popen.wait(timeout=timeout_s)


def read_settings() -> dict[str, Any]:
    """Read the settings from the owner.  Called in the child."""
    return json.load(sys.stdin)


def owner_pid() -> int:
    """Return the id of the process that started this one.  Called in the child."""
    return int(sys.argv[1])


# Ends


def end_with_family(owner_pid: int, poll_s: float = OWNER_POLL_S) -> threading.Thread:
    """Kill this process and its descendants once ``owner_pid`` is no longer its parent, or a child has failed.

    Children are ``multiprocessing`` processes started after this call.  A parent may wait forever for a failed child
    or its siblings, so it is killed too, then its own parent, up to the owner's child, whose exit status the owner
    reads.
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
    """Return a list to which every process that ``multiprocessing`` starts is added; its own list omits dead ones."""
    children: list[BaseProcess] = []
    start = getattr(BaseProcess.start, "__wrapped__", BaseProcess.start)  # a forked process inherits a wrapped one

    @wraps(start)
    def noted(process: BaseProcess) -> None:
        start(process)
        children.append(process)

    BaseProcess.start = noted  # type: ignore[method-assign, assignment]
    return children


@contextmanager
def ending_family() -> Iterator[None]:
    """If the block raises, print the error and end this process and its descendants.

    Python would first wait for the process's children, which may wait for requests forever.
    """
    try:
        yield
    except Exception:  # top level of the process
        traceback.print_exc()
        for process in _family(os.getpid())[1:]:
            _kill(process)
        sys.stdout.flush()
        os._exit(1)


def _how_ended(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"


def kill_tree(pid: int, timeout_s: float = 10.0) -> list[int]:
    """Kill ``pid`` and all its descendants (SIGKILL) and wait until they are gone.

    If ``pid`` is this process, it is killed last and the call does not return.

    Returns:
        Ids of the processes that still exist after ``timeout_s`` seconds.
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
    """Return a process and its descendants; empty if it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _runs(process: psutil.Process) -> bool:
    """Return True for a running process; False for a zombie, whose exit status is left for its parent to read."""
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
    """Return the name of this run's folder: inherited from the process that started the run, or else a new one."""
    return env.log_run() or f"run-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def new_log_file(name: str) -> Path:
    """Create an empty file for the output of ``name``."""
    folder = log_folder()
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    handle, path = tempfile.mkstemp(prefix=f"{safe}.", suffix=".log", dir=folder)
    os.close(handle)
    return Path(path)


def log_folder() -> Path:
    """Return the folder of this run's logs.  If it does not exist, create it and remove the folders of old runs."""
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
            shutil.rmtree(run, ignore_errors=True)  # another run that is starting may do the same


def _last_write_s(folder: Path) -> float:
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except FileNotFoundError:  # another run has removed it
        return 0.0
