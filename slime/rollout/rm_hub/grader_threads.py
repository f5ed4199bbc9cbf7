"""Graders that take time run in threads, each grading under a deadline that begins when its thread does.

A thread cannot be stopped.  One whose grading is overdue is written off: it ends after that grading, if ever, and a
fresh one takes its place, so that hanging gradings do not use up the pool.  All are daemons: none holds up the exit.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

NUM_THREADS = 8


class _Grading:
    """One call of a grader, and who waits for it."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function = function
        self.args = args
        self.loop = asyncio.get_running_loop()
        self.started: asyncio.Future[_Worker] = self.loop.create_future()
        self.result: asyncio.Future[Any] = self.loop.create_future()

    def tell(self, future: asyncio.Future[Any], value: Any, error: BaseException | None = None) -> None:
        """Set a future from another thread; nobody may wait for it any more."""

        def settle() -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)

        try:
            self.loop.call_soon_threadsafe(settle)
        except RuntimeError:
            logger.debug("The event loop ended before the grading %s did.", self.function)


class _Worker(threading.Thread):
    """Takes gradings from the queue until it is written off or the pool has enough others."""

    def __init__(self, waiting: queue.SimpleQueue[_Grading]) -> None:
        super().__init__(name="grader", daemon=True)
        self._waiting = waiting
        self.is_written_off = False

    def run(self) -> None:
        while not self.is_written_off:
            grading = self._waiting.get()
            grading.tell(grading.started, self)
            try:
                value = grading.function(*grading.args)
            except BaseException as error:  # handed to whoever waits for the grading
                grading.tell(grading.result, None, error)
            else:
                grading.tell(grading.result, value)


class GraderThreads:
    """A pool of ``num_threads`` working threads, started when the first grading comes.

    Invariant: threads that are not written off number ``num_threads``, so every grading is begun some day.
    """

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._num_threads = num_threads
        self._waiting: queue.SimpleQueue[_Grading] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()

    async def run(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> Any:
        """What ``function(*args)`` returns or raises.

        Raises:
            TimeoutError: it did not return within ``timeout_s`` of its start.  The time before is not counted: it is
                bounded by the deadlines of those that came first.
        """
        self._fill()
        grading = _Grading(function, args)
        self._waiting.put(grading)
        worker = await grading.started
        try:
            return await asyncio.wait_for(grading.result, timeout_s)
        except TimeoutError:
            if grading.result.done() and not grading.result.cancelled():
                raise  # the grader's own
            self._write_off(worker)
            raise TimeoutError(f"no result within {timeout_s:g} s") from None

    def _fill(self) -> None:
        with self._lock:
            while len(self._workers) < self._num_threads:
                worker = _Worker(self._waiting)
                self._workers.append(worker)
                worker.start()

    def _write_off(self, worker: _Worker) -> None:
        with self._lock:
            worker.is_written_off = True
            if worker in self._workers:
                self._workers.remove(worker)


GRADER_THREADS = GraderThreads()
"""The pool of this process."""
