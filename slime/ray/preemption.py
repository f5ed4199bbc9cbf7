"""SIGTERM to the driver or to a rank of its trainer, with time to save first (``--preemption-grace-s``).

    notice -> the step that the trainer takes ends -> its checkpoint is written -> the job leaves

The next start of the same command goes on there.  Without a grace the job leaves at once, and the steps since its last
checkpoint are repeated.  Where ranks can start elsewhere (``TrainerRecovery.can_let_go``), a rank's signal ends these
ranks and not the job.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from slime.utils.errors import EngineDiedError, SlimeError

logger = logging.getLogger(__name__)


class Interrupted(BaseException):
    """SIGTERM (``ray job stop``, a rank's node that is taken away) reached the driver."""


class RanksLeave(SlimeError):
    """SIGTERM reached ranks of the trainer, which can go on without their nodes; the trainer is idle."""


class Notice:
    """The driver's reaction to SIGTERM.

    The handler only takes note: an exception out of it, in the middle of a call of Ray, becomes a SystemError.  Every
    wait of the driver asks :meth:`check` at least once a second.
    """

    def __init__(self) -> None:
        self.grace_s = 0.0
        """Seconds from the signal to the end of a save."""
        self.save: Callable[[], None] = lambda: None
        """Saves what was trained since the last checkpoint; the trainer is idle."""
        self.lets_go: Callable[[str], bool] = lambda rank: False
        """Whether the job goes on without the node of a rank, given by its name."""
        self.leaving: set[str] = set()
        """Names of ranks that were told to leave, and are let go."""
        self._came_at: float | None = None
        self._is_over = False
        self._depth = self._num_letting_go = 0

    def listen(self) -> None:
        """Take the place of the present handlers of SIGTERM and of the alarm."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_alarm)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold the interruption back while the trainer works, for as long as the grace allows."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        self._check_own()

    @contextmanager
    def letting_go(self) -> Iterator[None]:
        """Have :meth:`check` raise RanksLeave within the block, whose caller saves and starts the ranks elsewhere."""
        self._num_letting_go += 1
        try:
            yield
        finally:
            self._num_letting_go -= 1

    @property
    def has_come(self) -> bool:
        """True once SIGTERM has told the job to leave."""
        return self._came_at is not None

    def tell(self, rank: str) -> None:
        """Heed the SIGTERM that a rank got: where it cannot be let go it is the driver's own."""
        if self.lets_go(rank):
            self.leaving.add(rank)
        else:
            signal.raise_signal(signal.SIGTERM)

    def departure(self) -> EngineDiedError | None:
        """Return the end of ranks that were told to leave, as the death that others see."""
        return EngineDiedError(f"{self._who()} left after SIGTERM") if self.leaving else None

    def check(self) -> None:
        """Raise Interrupted where the job is to leave now, RanksLeave where ranks are to."""
        self._check_own()
        if self.leaving and self._num_letting_go and not self._depth:
            raise RanksLeave(f"SIGTERM to {self._who()}")

    def _check_own(self) -> None:
        if self.has_come and (self._is_over or not (self._depth and self.grace_s)):
            raise Interrupted

    def _who(self) -> str:
        return ", ".join(sorted(self.leaving))

    def leave(self) -> None:
        """Save, after an interruption by SIGTERM, in what is left of the grace."""
        if self._came_at is None or not self.grace_s:
            return
        self._depth += 1  # another SIGTERM does not end the save
        try:
            self.save()
            logger.warning("Saved %.1f s after SIGTERM.", time.monotonic() - self._came_at)
        except Interrupted:
            logger.error("--preemption-grace-s %g was too short for the save; the one before it counts.", self.grace_s)
        except Exception as error:  # a rank's death shows in whatever the others were doing
            logger.error("The save after SIGTERM failed, and the one before it counts: %s", error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        is_first = self._came_at is None
        self._came_at = self._came_at or time.monotonic()
        if is_first and self.grace_s:
            signal.setitimer(signal.ITIMER_REAL, self.grace_s)

    def _on_alarm(self, signum: int, frame: FrameType | None) -> None:
        self._is_over = True


NOTICE = Notice()
"""That of this driver."""
