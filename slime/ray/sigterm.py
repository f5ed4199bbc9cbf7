"""SIGTERM to the driver (``ray job stop``), or to a process of its job: the next wait of the driver ends.

The handler only takes note: an exception out of it, in the middle of a call of Ray, becomes a SystemError.
"""

from __future__ import annotations

import signal
from types import FrameType


class Interrupted(BaseException):
    """SIGTERM has told the job to leave; its cause, if it has one, says more."""


class Sigterm:
    """The driver's reaction to SIGTERM: it leaves at once."""

    def __init__(self) -> None:
        self.has_come = False

    def listen(self) -> None:
        """Take the place of the present handler."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def check(self) -> None:
        """Raise Interrupted when the job must leave; every wait asks at least once a second."""
        if self.has_come:
            raise Interrupted

    def reached(self, name: str) -> None:
        """React to the SIGTERM that a watched actor got."""
        signal.raise_signal(signal.SIGTERM)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.has_come = True


_reactions = [Sigterm()]


def sigterm() -> Sigterm:
    """Return the reaction of this driver."""
    return _reactions[-1]


def react_by(reaction: Sigterm) -> None:
    """Have this driver react to SIGTERM in another way from now on."""
    _reactions[:] = [reaction]
