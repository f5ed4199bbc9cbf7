"""Runs Python that a model wrote: in a process of its own, with bounds on time, memory, output and imports.

What the program can reach is chosen by name (``sandbox_child.py``): modules of pure computation, no files, no
network, no other process.  That holds off a policy that learns to cheat its grader, and accidents.  It is no
barrier against somebody who wants to break out of CPython: for that, put the rollout process into a container, or
run the programs in one (``slime.agent.sandbox``).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

CHILD = Path(__file__).with_name("sandbox_child.py")
START_S = 10.0
"""On top of ``time_s``: what a process may take to start and to end on a machine with busy cores."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one program."""

    time_s: float = 5.0
    """Of its processor; on the clock it may take ``START_S`` longer."""
    memory_mib: int = 512
    """Address space, the interpreter included (about 20 MiB)."""
    output_characters: int = 2000


@dataclass(frozen=True)
class Result:
    """The result of a program."""

    is_ok: bool
    """It ran to its end."""
    output: str
    """Its output, then the error in one line, if there was one."""


class PythonSandbox:
    """Runs up to ``processes`` programs at the same time; others wait for their turn."""

    def __init__(self, limits: Limits, *, processes: int) -> None:
        self.limits = limits
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="sandbox")

    async def run(self, program: str) -> Result:
        """Run it, without holding up the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, run_program, program, self.limits)


def run_program(program: str, limits: Limits) -> Result:
    """Run ``program`` and wait for its end, which comes after ``time_s`` at the latest.

    Raises:
        OSError: no process could be started; that is the machine's fault and not the program's.
    """
    with tempfile.TemporaryDirectory(prefix="slime-sandbox-") as folder:
        # -I -S: nothing of the user's environment, no site-packages.  The child sets its own limits before it reads.
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(CHILD), json.dumps(asdict(limits))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"LANG": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            raw, _ = child.communicate(program.encode(errors="replace"), timeout=limits.time_s + START_S)
        except subprocess.TimeoutExpired:
            raw = b""
        finally:
            _kill(child)
    return _read(raw, limits)


def _read(raw: bytes, limits: Limits) -> Result:
    """The child's last words; one that was killed had none."""
    try:
        answer = json.loads(raw)
    except ValueError:
        return Result(False, f"error: killed; {limits.time_s:g} s and {limits.memory_mib} MiB are allowed")
    output = answer["output"][: limits.output_characters].rstrip("\n")
    if answer["error"]:
        output = f"{output}\n{answer['error']}".lstrip("\n")
    return Result(not answer["error"], output or "(no output)")


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End what is left of the child and of all that it may have started."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it is gone, as it should be
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
