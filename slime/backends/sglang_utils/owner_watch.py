"""A process tree that ends when the process that owns it ends, however that happened.

A child cannot rely on its parent's clean-up: SIGKILL leaves no time for it.  So each process looks, once a second,
whether its parent is still the one that started it.  (The kernel's own parent-death signal fires when the *thread*
that forked ends, which kills servers that a short-lived thread started.)
"""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil

POLL_S = 1.0


def end_with_owner(owner_pid: int, poll_s: float = POLL_S) -> threading.Thread:
    """From now on, kill this process and its descendants once ``owner_pid`` is no longer its parent."""

    def watch() -> None:
        while os.getppid() == owner_pid:
            time.sleep(poll_s)
        kill_tree(os.getpid())

    thread = threading.Thread(target=watch, name="owner-watch", daemon=True)
    thread.start()
    return thread


def kill_tree(pid: int, timeout_s: float = 10.0) -> list[int]:
    """SIGKILL ``pid`` and all its descendants and wait until they are gone.

    When ``pid`` is this process, it dies last and the call does not return.

    Returns:
        The processes that still existed after ``timeout_s`` seconds.
    """
    try:
        root = psutil.Process(pid)
        family = root.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    for process in family:
        _kill(process)
    if pid == os.getpid():
        os.kill(pid, signal.SIGKILL)
    _kill(root)
    deadline = time.monotonic() + timeout_s
    alive = [*family, root]
    while (alive := [process for process in alive if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [process.pid for process in alive]


def _runs(process: psutil.Process) -> bool:
    """False for a zombie too: its exit status is for its parent to read, and reading it here would lose it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
