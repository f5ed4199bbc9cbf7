"""What an examination of a plug-in found: steps that held, warnings, and failures with the line they come from."""

from __future__ import annotations

import asyncio
import sysconfig
import time
import traceback
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.utils.async_utils import run

ROOT = Path(__file__).resolve().parents[2]
OURS = ("slime", "tools")

LONG_BLOCK_S = 0.1
"""Other requests of the rollout wait while a plug-in keeps the event loop."""
BEAT_S = 0.005
_NOT_THEIRS = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), *(str(ROOT / name) for name in OURS))
LOOP_MARGIN_S = 30.0
"""The deadline of the wait for the event loop itself comes after that of the call in it."""


class Broken(Exception):
    """A promise that the plug-in did not keep."""


@dataclass
class Findings:
    """The result for one plug-in."""

    flag: str
    path: str
    steps: list[tuple[str, str, str]] = field(default_factory=list)
    """(ok, warn or FAIL; what was tried; detail)."""

    @property
    def failures(self) -> list[str]:
        """What must be changed."""
        return [f"{what}: {detail}" for verdict, what, detail in self.steps if verdict == "FAIL"]

    def warn(self, what: str, detail: str) -> None:
        """Note what works, but will hurt."""
        self.steps.append(("warn", what, detail))

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Try one thing; an exception inside is a failure of the plug-in, and the check continues."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:  # whatever a plug-in may raise
            self.steps.append(("FAIL", what, _describe(error)))
        else:
            self.steps.append(("ok", what, f"{(time.perf_counter() - began) * 1e3:.1f} ms"))

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        """Run a coroutine in slime's event loop, under a deadline; warn when it blocks the loop."""
        return run(self._watched(coroutine, timeout_s), timeout_s + LOOP_MARGIN_S)

    async def _watched(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        longest = 0.0

        async def heartbeat() -> None:
            nonlocal longest
            while True:
                before = time.perf_counter()
                await asyncio.sleep(BEAT_S)
                longest = max(longest, time.perf_counter() - before - BEAT_S)

        beat = asyncio.create_task(heartbeat())
        await asyncio.sleep(0)
        try:
            return await asyncio.wait_for(coroutine, timeout_s)
        except TimeoutError:
            raise Broken(f"it did not finish within {timeout_s:g} s") from None
        finally:
            await asyncio.sleep(2 * BEAT_S)  # the heartbeat sees the last block, too
            beat.cancel()
            if longest > LONG_BLOCK_S:
                self.warn(
                    "event loop",
                    f"blocked for {longest:.2f} s, while every other request waits; use await, or asyncio.to_thread",
                )

    def report(self) -> str:
        """The findings as text."""
        lines = [f"{self.flag} {self.path}"]
        lines += [f"  {verdict:<5}{what}: {detail}" for verdict, what, detail in self.steps]
        lines.append(f"  {'FAILED' if self.failures else 'passed'}")
        return "\n".join(lines)


def _describe(error: Exception) -> str:
    if isinstance(error, Broken):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)] or frames
    where = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
    return f"raised {type(error).__name__}: {error}{where}"


def expect(holds: Any, complaint: str) -> None:
    """Fail the present step unless ``holds``."""
    if not holds:
        raise Broken(complaint)
