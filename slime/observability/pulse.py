"""How far the work of a process has come, for whoever waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from slime.utils.misc import SingletonMeta


@dataclass(frozen=True, slots=True)
class Beat:
    """The answer: what the process works on now."""

    num_marks: int
    """Pieces of work begun so far."""
    phase: str | None
    """Kind of the piece; None between those that are marked."""
    elapsed_s: float
    """Since it began."""
    longest_s: float | None
    """Time that the longest piece of this kind took; None while the first one runs."""

    def overdue_s(self) -> float:
        """Return the seconds beyond twice the longest piece; 0 where nothing is known to expect."""
        return 0.0 if self.phase is None or self.longest_s is None else self.elapsed_s - 2 * self.longest_s


class Pulse(metaclass=SingletonMeta):
    """The marks of this process.  One thread marks; any may read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[int, str | None, float] = (0, None, clock())
        self._longest_s: dict[str, float] = {}

    def mark(self, phase: str | None) -> None:
        """Begin a piece of work of the kind ``phase``, which ends the one before; None only ends that."""
        number, before, since = self._last
        now = self._clock()
        if before is not None:
            self._longest_s[before] = max(self._longest_s.get(before, 0.0), now - since)
        self._last = number + 1, phase, now

    def beat(self) -> Beat:
        """Return how far the work has come."""
        number, phase, since = self._last
        return Beat(number, phase, self._clock() - since, self._longest_s.get(phase or ""))
