"""SIGTERM to the driver or to a rank of its trainer, with time to save first (``--preemption-grace-s``).

    notice -> the step that the trainer takes ends -> its checkpoint is written -> the job leaves

The next start of the same command resumes there.  Without a grace the job leaves at once, and the steps since its last
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

from slime.ray.waiting import Interrupted, Sigterm
from slime.utils.errors import EngineDiedError, SlimeError

logger = logging.getLogger(__name__)


class RanksLeave(SlimeError):
    """SIGTERM reached ranks of the trainer, which can do without their nodes; the trainer is idle."""


class Preemption(Sigterm):
    """Saves before the job leaves, and lets ranks leave alone.

    Args:
        grace_s: seconds from the signal to the end of a save.
        save: saves what was trained since the last checkpoint; the trainer is idle.
        lets_go: whether the job can do without the node of a rank, given by its name.
    """

    def __init__(
        self,
        grace_s: float = 0.0,
        save: Callable[[], None] = lambda: None,
        lets_go: Callable[[str], bool] = lambda rank: False,
    ) -> None:
        super().__init__()
        self.grace_s, self.save, self.lets_go = grace_s, save, lets_go
        self.leaving: set[str] = set()
        """Names of ranks that got the signal, and are let go."""
        self._came_at = 0.0
        self._is_over = self._has_left = False
        self._depth = self._num_letting_go = 0

    def listen(self) -> None:
        """Take the place of the present handlers of SIGTERM and of the alarm."""
        super().listen()
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

    def reached(self, name: str) -> None:
        """Let a rank leave where that is possible; otherwise the signal is the driver's own."""
        if self.lets_go(name):
            self.leaving.add(name)
        else:
            super().reached(name)

    def departure(self) -> EngineDiedError | None:
        """Return the end of the ranks that leave, as the death that others see."""
        return EngineDiedError(f"{self._who()} left after SIGTERM") if self.leaving else None

    def check(self) -> None:
        """Raise Interrupted when the job must leave, after a save; raise RanksLeave when ranks must."""
        self._check_own()
        if self.leaving and self._num_letting_go and not self._depth:
            raise RanksLeave(f"SIGTERM to {self._who()}")

    def _check_own(self) -> None:
        if self.has_come and (self._is_over or not (self._depth and self.grace_s)):
            self._leave()
            raise Interrupted

    def _who(self) -> str:
        return ", ".join(sorted(self.leaving))

    def _leave(self) -> None:
        """Save, once, in what is left of the grace."""
        if not self.grace_s or self._has_left:
            return
        self._has_left = True
        self._depth += 1  # another SIGTERM does not end the save
        try:
            if self._is_over:
                raise Interrupted
            self.save()
            logger.warning("Saved %.1f s after SIGTERM.", time.monotonic() - self._came_at)
        except Interrupted:
            logger.error("--preemption-grace-s %g was too short for the save; the one before it counts.", self.grace_s)
        except Exception as error:  # a rank's death shows in whatever the others were doing
            logger.error("The save after SIGTERM failed, and the one before it counts: %s", error)
        finally:
            self._depth -= 1
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if not self.has_come:
            self._came_at = time.monotonic()
            if self.grace_s:
                signal.setitimer(signal.ITIMER_REAL, self.grace_s)
        super()._on_signal(signum, frame)

    def _on_alarm(self, signum: int, frame: FrameType | None) -> None:
        self._is_over = True
