"""Runs model-written Python code, isolated by the kernel and with limits on time, memory and output.

A program sees the standard library and an empty folder.  It cannot start processes, open sockets, or access files or
environment variables of this machine (``slime.agent.sandbox.runner``).
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass

from slime.agent.sandbox.runner import IsolatedRunner
from slime.agent.sandbox.runner import Limits as RunnerLimits

START_S = 10.0
"""Wall-clock seconds beyond ``time_s`` that a program may sleep or wait for busy cores."""
DISK_MIB = 16
THREADS = 16


@dataclass(frozen=True)
class Limits:
    """Limits of one program."""

    time_s: float = 5.0
    """CPU time; the wall-clock limit is ``START_S`` longer."""
    memory_mib: int = 512
    """Address space, including the interpreter (about 30 MiB)."""
    output_characters: int = 2000


@dataclass(frozen=True)
class Result:
    """The result of a program."""

    is_ok: bool
    """The program ended without an error."""
    output: str
    """Its output, followed by the error in one line, if any."""


class PythonSandbox:
    """Runs up to ``processes`` programs concurrently; others wait."""

    def __init__(self, limits: Limits, *, processes: int, is_unsafe: bool = False) -> None:
        self.limits, self.processes, self.is_unsafe = limits, processes, is_unsafe

    async def run(self, program: str) -> Result:
        """Run a program without blocking the event loop.

        Raises:
            ConfigError: this machine cannot isolate programs.
            SandboxError: isolation failed, which is not the program's fault.
        """
        async with _free(self.processes, id(asyncio.get_running_loop())):
            return await _run(program, self.limits, self.is_unsafe)


def run_program(program: str, limits: Limits, *, is_unsafe: bool = False) -> Result:
    """Run one program, outside of an event loop."""
    return asyncio.run(_run(program, limits, is_unsafe))


async def _run(program: str, limits: Limits, is_unsafe: bool) -> Result:
    bounds = RunnerLimits(
        memory_mib=limits.memory_mib,
        disk_mib=DISK_MIB,
        processes=THREADS,
        output_bytes=4 * limits.output_characters,  # UTF-8
    )
    own = {"as": limits.memory_mib << 20, "cpu": max(1, int(limits.time_s + 0.999))}
    async with IsolatedRunner(bounds, is_unsafe=is_unsafe) as runner:
        try:
            ended = await runner.run(
                None, stdin=program.encode(errors="replace"), timeout_s=limits.time_s + START_S, limits=own
            )
        except TimeoutError:
            return _killed(limits)
    output = ended.out.decode(errors="replace")
    if "output" in ended.reason or len(output) > limits.output_characters + 1:
        return Result(False, f"{output[: limits.output_characters]}\nerror: the output is too long")
    if ended.code < 0:
        return _killed(limits)
    return Result(ended.code == 0, output.rstrip("\n") or "(no output)")


def _killed(limits: Limits) -> Result:
    return Result(False, f"error: killed; {limits.time_s:g} s and {limits.memory_mib} MiB are allowed")


@functools.cache
def _free(count: int, loop: int) -> asyncio.Semaphore:
    """Return the semaphore that limits the programs of one event loop."""
    return asyncio.Semaphore(count)
