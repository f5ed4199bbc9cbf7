"""Runs Python that a model wrote: isolated by the kernel, with bounds on time, memory and output.

A program sees the standard library and an empty folder.  It cannot start a process or open a socket, and no file or
variable of this machine is in its reach (``slime.agent.sandbox.runner``).
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass

from slime.agent.sandbox.runner import IsolatedRunner
from slime.agent.sandbox.runner import Limits as RunnerLimits

START_S = 10.0
"""On top of ``time_s``: what a program may sleep or wait for busy cores."""
DISK_MIB = 16
THREADS = 16


@dataclass(frozen=True)
class Limits:
    """Bounds of one program."""

    time_s: float = 5.0
    """Of its processor; on the clock it may take ``START_S`` longer."""
    memory_mib: int = 512
    """Address space, the interpreter included (about 30 MiB)."""
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

    def __init__(self, limits: Limits, *, processes: int, is_unsafe: bool = False) -> None:
        self.limits, self.processes, self.is_unsafe = limits, processes, is_unsafe

    async def run(self, program: str) -> Result:
        """Run it, without holding up the event loop.

        Raises:
            ConfigError: this machine cannot isolate programs.
            SandboxError: isolation failed; that is the machine's fault and not the program's.
        """
        async with _free(self.processes, id(asyncio.get_running_loop())):
            return await _run(program, self.limits, self.is_unsafe)


def run_program(program: str, limits: Limits, *, is_unsafe: bool = False) -> Result:
    """Run one program where no event loop runs."""
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
    """Return what bounds the programs of one event loop."""
    return asyncio.Semaphore(count)
