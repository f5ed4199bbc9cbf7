"""SIGTERM to the driver or to a trainer rank, with time to save first (``--preemption-grace-s``).

    SIGTERM -> the trainer's current step ends -> its checkpoint is written -> the job exits

The next start of the same command resumes there.  Without a grace period the job exits at once, and the steps since
the last checkpoint are repeated.  If ranks can restart elsewhere (``TrainerRecovery.can_let_go``), a signal to a rank
ends these ranks and not the job.
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
    """SIGTERM reached trainer ranks that can restart elsewhere; raised while the trainer is idle."""


class Preemption(Sigterm):
    """Reaction to SIGTERM that saves before the job exits, or lets only the affected ranks leave.

    Args:
        grace_s: seconds from the signal until the save must be done.
        save: saves training since the last checkpoint; called while the trainer is idle.
        lets_go: given a rank's name, returns whether the job can continue without that rank's node.
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
        """Names of ranks that received the signal and will leave."""
        self._came_at = 0.0
        self._is_over = self._has_left = False
        self._depth = self._num_letting_go = 0

    def listen(self) -> None:
        """Install handlers for SIGTERM and SIGALRM."""
        super().listen()
        signal.signal(signal.SIGALRM, self._on_alarm)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer the interruption while the trainer works, within the grace period."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        self._check_own()

    @contextmanager
    def letting_go(self) -> Iterator[None]:
        """Within the block, let :meth:`check` raise RanksLeave; the caller then saves and restarts ranks elsewhere."""
        self._num_letting_go += 1
        try:
            yield
        finally:
            self._num_letting_go -= 1

    def reached(self, name: str) -> None:
        """Let a rank leave if possible; otherwise treat the signal as the driver's own."""
        if self.lets_go(name):
            self.leaving.add(name)
        else:
            super().reached(name)

    def departure(self) -> EngineDiedError | None:
        """Return an error for the departure of the leaving ranks; None if no rank leaves."""
        return EngineDiedError(f"{self._who()} left after SIGTERM") if self.leaving else None

    def check(self) -> None:
        """Raise Interrupted, after a save, if the job must exit; raise RanksLeave if ranks must leave."""
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
        """Save once, within the rest of the grace period."""
        if not self.grace_s or self._has_left:
            return
        self._has_left = True
        self._depth += 1  # another SIGTERM must not end the save
        try:
            if self._is_over:
                raise Interrupted
            self.save()
            logger.warning("Saved %.1f s after SIGTERM.", time.monotonic() - self._came_at)
        except Interrupted:
            logger.error("--preemption-grace-s %g was too short for the save; the previous one counts.", self.grace_s)
        except Exception as error:  # a rank's death surfaces in whatever the others were doing
            logger.error("The save after SIGTERM failed; the previous one counts: %s", error)
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
