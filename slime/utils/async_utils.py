"""One event loop in a background thread, for synchronous code that needs coroutines.

A rollout function is synchronous, but its requests are not; ``run(coroutine)`` bridges the two.  The loop lives as
long as the process, so connections and semaphores created on it stay valid across rollouts.
"""

from __future__ import annotations

import asyncio
import atexit
import faulthandler
import functools
import gc
import logging
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar, cast

from slime.utils.errors import DeadlineError, HookError, ProcessError
from slime.utils.plugins import frames_of, frames_of_thread, said_by

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 86400.0
"""Default timeout of ``run`` in seconds; also the default of ``--rollout-timeout-s``."""
STALL_TIMEOUT_S = 600.0
"""Seconds that the loop may be blocked; the default of ``--loop-stall-timeout-s``."""
STALL_WARNING_S = 10.0
"""Seconds of blocking after which a warning is logged; repeated after twice, four times ... as long."""
BEAT_S = 1.0
"""Seconds between heartbeats."""
INTERPRETER_MARGIN_S = 60.0
"""Seconds beyond the stall timeout after which the process is ended, if code holds the GIL so that no Python thread
can report the stall."""
STDERR = 2
OBJECTS_PER_REQUEST = 256
"""Container objects kept alive by a request in flight: tasks, connection, buffers, sample and spans."""
MIN_YOUNG_OBJECTS = 20_000


class StallTimeout:
    """The stall timeout of this process."""

    seconds = STALL_TIMEOUT_S


class LoopWatch:
    """Monitors an event loop by heartbeats, from the thread that waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        self._loop = loop
        self._thread = thread
        self._warn_s = min(STALL_WARNING_S, StallTimeout.seconds / 2)
        self._answered = threading.Event()
        self._send()

    def _send(self) -> None:
        self._answered.clear()
        self._sent_s = time.monotonic()
        self._loop.call_soon_threadsafe(self._answered.set)

    def look(self) -> None:
        """Send a heartbeat if the last one was answered; otherwise log what blocks the loop.

        Raises:
            DeadlineError: the loop has been blocked for ``--loop-stall-timeout-s``.
        """
        if self._answered.is_set():
            self._warn_s = min(STALL_WARNING_S, StallTimeout.seconds / 2)
            self._send()
            return
        passed_s = time.monotonic() - self._sent_s
        limit_s = StallTimeout.seconds
        if passed_s < min(self._warn_s, limit_s):
            return
        call, frames = frames_of_thread(self._thread)
        blocked = (
            f"The event loop of the rollout has been blocked for {passed_s:.0f} s by {call or 'code'} at\n{frames}"
        )
        if passed_s >= limit_s:
            raise DeadlineError(
                f"{blocked}\nMeanwhile the rollout handles no requests and no deadlines. Await instead of blocking "
                "(asyncio.to_thread for slow synchronous code), or raise --loop-stall-timeout-s."
            )
        logger.warning("%s\nThe run ends if this lasts %g s (--loop-stall-timeout-s).", blocked, limit_s)
        self._warn_s *= 2


class AsyncLoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._escaped: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="slime-async-loop", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                return self.loop.run_forever()
            except BaseException as error:  # a task raised SystemExit; run() raises it to its caller
                logger.error("%s ended a task of the background loop.", type(error).__name__, exc_info=error)
                self._escaped = error

    def is_alive(self) -> bool:
        """Return True while the loop runs; False in a forked child, which has the object but not the thread."""
        return self._thread.is_alive() and self.loop.is_running()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = DEFAULT_TIMEOUT_S) -> T:
        """Run the coroutine and return its result; cancel it if the wait ends early (deadline or Ctrl-C)."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise ProcessError("run() was called on the background loop itself; await the coroutine instead.")
        name = getattr(coroutine, "__qualname__", coroutine)
        deadline_s = time.monotonic() + timeout_s
        self._escaped = None
        _arm()
        future = asyncio.run_coroutine_threadsafe(_outcome(coroutine), self.loop)
        watch = LoopWatch(self.loop, self._thread)
        try:
            while True:
                left_s = max(0.0, deadline_s - time.monotonic())
                try:
                    value, failure = future.result(min(BEAT_S, left_s))
                    if failure is not None:
                        break
                    return cast(T, value)
                except FutureTimeoutError as error:
                    if left_s <= BEAT_S and not future.done():
                        call, _ = frames_of_thread(self._thread)
                        blocked = f" {call} blocks its loop." if call else ""
                        raise DeadlineError(
                            f"{name} did not end within {timeout_s:.0f} s; see --rollout-timeout-s.{blocked}"
                        ) from error
                except (SystemExit, KeyboardInterrupt) as error:
                    if not future.done():  # Ctrl-C
                        raise
                    raise _ended(error) from error
                if self._escaped is not None:
                    raise _ended(self._escaped) from self._escaped
                watch.look()
                _arm()
        except BaseException:
            future.cancel()
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
        raise failure


async def _outcome(coroutine: Coroutine[Any, Any, T]) -> tuple[T | None, Exception | None]:
    """Return a coroutine's result or exception, because a future would copy a TimeoutError without its notes."""
    try:
        return await coroutine, None
    except Exception as error:
        return None, error


def _arm() -> None:
    """Rearm a watchdog that dumps all stacks and ends the process.

    It is a C thread, so it works even while code holds the GIL and stops all Python threads.
    """
    faulthandler.dump_traceback_later(StallTimeout.seconds + INTERPRETER_MARGIN_S, exit=True, file=STDERR)


def _ended(error: BaseException) -> HookError:
    return HookError(
        f"A task of the rollout's event loop raised {said_by(error)}. A plug-in must not end the process; raise "
        f"an exception instead.\n{frames_of(error)}"
    )


_LOOPS: list[AsyncLoopThread] = []
_LOOPS_LOCK = threading.Lock()


def get_async_loop() -> AsyncLoopThread:
    """Return the background loop of this process, started on the first call."""
    with _LOOPS_LOCK:
        if not _LOOPS or not _LOOPS[-1]._thread.is_alive():
            _LOOPS[:] = [AsyncLoopThread()]
        return _LOOPS[-1]


def run(coroutine: Coroutine[Any, Any, T], timeout_s: float = DEFAULT_TIMEOUT_S) -> T:
    """Run the coroutine and return its result; cancel it if the wait ends early (deadline or Ctrl-C).

    Raises:
        DeadlineError: it did not end within ``timeout_s`` seconds, or something blocked the loop for
            ``--loop-stall-timeout-s``.
        HookError: a task of the loop raised SystemExit or KeyboardInterrupt.
    """
    return get_async_loop().run(coroutine, timeout_s)


@functools.cache
def tune_garbage_collection(num_requests: int) -> None:
    """Exclude long-lived objects from garbage collection, and collect less often.

    Half a million objects of torch and transformers live as long as the process, so they are frozen.  A collection
    starts once there are more new objects than ``num_requests`` requests in flight need.  With Python's default
    threshold of 700, collections repeatedly scan live requests, for a third of the client's CPU time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(max(MIN_YOUNG_OBJECTS, OBJECTS_PER_REQUEST * num_requests), 10, 10)
    atexit.register(gc.unfreeze)  # libraries that check for leaks at exit must see their objects
