"""Long waits for tasks, with a deadline and a progress line."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol, TextIO

from slime.rollout.config import RolloutConfig
from slime.rollout.engine_client import busy_engines
from slime.utils.async_utils import DEFAULT_TIMEOUT_S
from slime.utils.errors import DeadlineError
from slime.utils.plugins import SECONDS, calls_under_way

logger = logging.getLogger(__name__)

LINE_INTERVAL_S = 15.0
REDRAW_INTERVAL_S = 0.5
CANCEL_WAIT_S = 30.0
_BAR_CELLS = 24


class Bar(Protocol):
    """A progress bar elsewhere."""

    def update(self, n: int) -> None:
        """Move the bar by ``n``."""

    def close(self) -> None:
        """Remove the bar."""


class LongWait:
    """Deadline and progress line of one wait.

    On a terminal the line is redrawn in place.  Otherwise a new line is written every ``LINE_INTERVAL_S`` seconds, so
    short waits write nothing.
    """

    make_bar: Callable[[str, int], Bar] | None = None
    """Makes a bar on the driver's terminal from a title and a total, in the place of the line."""

    def __init__(
        self,
        title: str,
        total: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title = title
        self.total = total
        self.timeout_s = timeout_s
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._is_terminal = self._stream.isatty()
        self._bar: Bar | None = None
        self._num_drawn = 0
        is_redrawn = self._is_terminal or type(self).make_bar is not None
        self.interval_s = REDRAW_INTERVAL_S if is_redrawn else LINE_INTERVAL_S
        """Seconds between two lines."""
        self._start_s = clock()
        self._seconds_before = dict(SECONDS)
        self._shown_s = self._start_s
        self._drew = False

    @property
    def elapsed_s(self) -> float:
        """Seconds since the wait began."""
        return self._clock() - self._start_s

    @property
    def remaining_s(self) -> float:
        """Seconds to the deadline; never negative."""
        return max(0.0, self.timeout_s - self.elapsed_s)

    def seconds_in_plugins(self) -> dict[str, float]:
        """Return the seconds each synchronous plug-in has blocked the event loop during this wait, if at least 1."""
        before = self._seconds_before
        spent = {name: round(seconds - before.get(name, 0.0), 1) for name, seconds in dict(SECONDS).items()}
        return {name: seconds for name, seconds in spent.items() if seconds >= 1}

    def show(self, done: int, detail: str = "") -> None:
        """Draw the progress line if ``interval_s`` has passed."""
        if self._clock() - self._shown_s < self.interval_s:
            return
        self._shown_s = self._clock()
        if (make_bar := type(self).make_bar) is not None:
            self._bar = self._bar or make_bar(self.title, self.total)
            self._bar.update(done - self._num_drawn)
            self._num_drawn = done
            return
        rate = done / self.elapsed_s if self.elapsed_s > 0 else 0.0
        left = f", about {(self.total - done) / rate:.0f} s left" if rate > 0 and done < self.total else ""
        filled = _BAR_CELLS * min(done, self.total) // max(self.total, 1)
        bar = "#" * filled + "." * (_BAR_CELLS - filled)
        line = f"{self.title} [{bar}] {done}/{self.total}, {self.elapsed_s:.0f} s{left}{detail and ', ' + detail}"
        self._stream.write(f"\r\x1b[K{line}" if self._is_terminal else f"{line}\n")
        self._stream.flush()
        self._drew = True

    def close(self) -> None:
        """End the line on a terminal, or remove the bar."""
        if self._bar is not None:
            self._bar.close()
        if self._drew and self._is_terminal:
            self._stream.write("\n")
            self._stream.flush()


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until all have ended, so that none outlives its rollout.

    If a custom function swallows the cancellation, its task is logged after ``CANCEL_WAIT_S`` seconds and left alone.
    """
    waiting = list(tasks)
    for task in waiting:
        task.cancel()
    if not waiting:
        return
    ended, left = await asyncio.wait(waiting, timeout=CANCEL_WAIT_S)
    for task in ended:
        if not task.cancelled():
            task.exception()  # mark it as retrieved; otherwise asyncio logs it
    if left:
        logger.error(
            "%d tasks have not ended %.0f s after they were cancelled, the first is %s. Which of these plug-ins "
            "catches CancelledError: %s?",
            len(left),
            CANCEL_WAIT_S,
            next(iter(left)),
            calls_under_way(),
        )


async def deadline_error(
    config: RolloutConfig, what: str, wait: LongWait, *, num_done: int, pending: str
) -> DeadlineError:
    """Return the error for a missed deadline, with the progress, the busy engines and the plug-ins that took time."""
    busy, calls = await busy_engines(config), calls_under_way()
    return DeadlineError(
        f"{what} did not end within {wait.timeout_s:.0f} s: {num_done} of {wait.total} are done, {pending}; "
        f"engines that hold requests: {busy or 'none'}; plug-ins under way, with calls: {calls or 'none'}; "
        f"plug-ins that blocked the loop, with seconds: {wait.seconds_in_plugins() or 'none'}. "
        "Look at these plug-ins and at the logs of these engines, or raise --rollout-timeout-s."
    )


async def wait_for_all(config: RolloutConfig, title: str, tasks: Collection[asyncio.Task[Any]], unit: str) -> None:
    """Wait until every task is done; raise the first error and cancel the other tasks.

    Wakes up once per progress interval, not once per task, so thousands of tasks cost no more than a few.

    Raises:
        DeadlineError: some tasks were not done within ``--rollout-timeout-s``.
    """
    wait = LongWait(title, len(tasks), timeout_s=config.rollout_timeout_s)
    pending = set(tasks)
    try:
        while pending:
            timeout_s = min(wait.interval_s, wait.remaining_s)
            done, pending = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            num_done = len(tasks) - len(pending)
            left = f"{len(pending)} {unit} pending"
            wait.show(num_done, left)
            if pending and wait.remaining_s <= 0:
                raise await deadline_error(config, f"The {title}", wait, num_done=num_done, pending=left)
    finally:
        wait.close()
        await cancel_all(pending)
