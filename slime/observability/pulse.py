"""Progress of a process's work, for processes that wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from slime.utils.misc import SingletonMeta


@dataclass(frozen=True, slots=True)
class Beat:
    """A progress report: what the process is working on."""

    num_marks: int
    """Number of marks so far."""
    phase: str | None
    """Kind of the current piece of work; None between marked pieces."""
    elapsed_s: float
    """Seconds since the last mark."""
    longest_s: float | None
    """Longest duration in seconds of a finished piece of this kind; None while the first one runs."""

    def overdue_s(self) -> float:
        """Return the seconds beyond twice the longest duration (negative before that); 0 if none is known."""
        return 0.0 if self.phase is None or self.longest_s is None else self.elapsed_s - 2 * self.longest_s


class Pulse(metaclass=SingletonMeta):
    """The progress marks of this process.  One thread marks; any thread may read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[int, str | None, float] = (0, None, clock())
        self._longest_s: dict[str, float] = {}

    def mark(self, phase: str | None) -> None:
        """End the current piece of work and begin one of kind ``phase``; None begins nothing."""
        number, before, since = self._last
        now = self._clock()
        if before is not None:
            self._longest_s[before] = max(self._longest_s.get(before, 0.0), now - since)
        self._last = number + 1, phase, now

    def beat(self) -> Beat:
        """Return the current progress."""
        number, phase, since = self._last
        return Beat(number, phase, self._clock() - since, self._longest_s.get(phase or ""))
