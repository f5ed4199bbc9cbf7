"""One event loop in a background thread, for synchronous code that needs coroutines.

A rollout function is synchronous; its requests are not.  ``run(coroutine)`` crosses that line.  The loop lives as long
as the process, so connections and semaphores made on it stay valid from one rollout to the next.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from slime.utils.errors import DeadlineError, ProcessError

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 86400.0
"""Longest wait of ``run``; the default of ``--rollout-timeout-s``."""


class AsyncLoopThread:
    """An event loop that runs in its own daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="slime-async-loop", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def is_alive(self) -> bool:
        """Return True while the loop serves; False in a forked child, which has the object but not the thread."""
        return self._thread.is_alive() and self.loop.is_running()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = DEFAULT_TIMEOUT_S) -> T:
        """Run the coroutine and return its result; it is cancelled when the wait ends early (deadline or Ctrl-C)."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise ProcessError("run() was called on the background loop itself; await the coroutine instead.")
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError as error:
            if future.done():  # the coroutine's own TimeoutError, which is the same class from Python 3.11 on
                raise
            future.cancel()
            raise DeadlineError(
                f"{getattr(coroutine, '__qualname__', coroutine)} did not end within {timeout_s:.0f} s; "
                "see --rollout-timeout-s."
            ) from error
        except BaseException:
            future.cancel()
            raise


_LOOPS: list[AsyncLoopThread] = []
_LOOPS_LOCK = threading.Lock()


def get_async_loop() -> AsyncLoopThread:
    """Return the background loop of this process, started on the first call."""
    with _LOOPS_LOCK:
        if not _LOOPS or not _LOOPS[-1]._thread.is_alive():
            _LOOPS[:] = [AsyncLoopThread()]
        return _LOOPS[-1]


def run(coroutine: Coroutine[Any, Any, T], timeout_s: float = DEFAULT_TIMEOUT_S) -> T:
    """Run the coroutine and return its result; it is cancelled when the wait ends early (deadline or Ctrl-C).

    Raises:
        DeadlineError: it did not end within ``timeout_s`` seconds (it is cancelled then).
    """
    return get_async_loop().run(coroutine, timeout_s)
