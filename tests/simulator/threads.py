"""Threads, locks, executors and event loops of the standard library, in virtual time."""

from __future__ import annotations

import asyncio
import collections
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from greenlet import GreenletExit

from tests.simulator.kernel import _KERNEL, Patches, Strand

_HUB = object()
"""The holder of a lock when no strand runs."""


def _running_strand() -> Any:
    kernel = _KERNEL[0]
    return None if kernel is None else kernel.current


class Lock:
    """threading.Lock and threading.RLock, in virtual time."""

    is_reentrant = False

    def __init__(self) -> None:
        self._owner: Any = None
        self._count = 0
        self._waiting: collections.deque[Strand] = collections.deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        kernel = _KERNEL[0]
        me: Any = (kernel and kernel.current) or _HUB
        if self._owner is None or (self.is_reentrant and self._owner is me):
            self._owner, self._count = me, self._count + 1
            return True
        if not blocking:
            return False
        assert kernel is not None and isinstance(me, Strand)
        deadline_s = None if timeout is None or timeout < 0 else kernel.now_s + timeout
        while self._owner is not None:
            self._waiting.append(me)
            if not kernel.park(None if deadline_s is None else deadline_s - kernel.now_s, "a lock"):
                return False
        self._owner, self._count = me, 1
        return True

    def release(self) -> None:
        self._count -= 1
        if self._count:
            return
        self._owner = None
        kernel = _KERNEL[0]
        while self._waiting and kernel is not None and not kernel.is_over:
            strand = self._waiting.popleft()
            if not strand.dead and strand.process.is_alive:
                kernel.wake(strand)
                break

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # What threading.Condition of a reentrant lock uses
    def _release_save(self) -> tuple[Any, int]:
        state = (self._owner, self._count)
        self._count = 1
        self.release()
        return state

    def _acquire_restore(self, state: tuple[Any, int]) -> None:
        self.acquire()
        self._count = state[1]


class RLock(Lock):
    is_reentrant = True


class Condition:
    """threading.Condition in virtual time."""

    def __init__(self, lock: Any = None) -> None:
        self._lock = lock if lock is not None else RLock()
        self._waiting: list[Strand] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *args: object) -> None:
        self._lock.__exit__(*args)

    def wait(self, timeout: float | None = None) -> bool:
        kernel, me = _KERNEL[0], _running_strand()
        assert kernel is not None and me is not None
        self._waiting.append(me)
        state = self._lock._release_save()
        try:
            kernel.park(timeout, "a condition")
        finally:
            was_told = me not in self._waiting
            if not was_told:
                self._waiting.remove(me)
            if not kernel.is_over:
                self._lock._acquire_restore(state)
        return was_told

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        kernel = _KERNEL[0]
        assert kernel is not None
        end_s = None if timeout is None else kernel.now_s + timeout
        result = predicate()
        while not result:
            left_s = None if end_s is None else end_s - kernel.now_s
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
            result = predicate()
        return result

    def notify(self, n: int = 1) -> None:
        kernel = _KERNEL[0]
        if kernel is None or kernel.is_over:
            return
        for strand in self._waiting[:n]:
            kernel.wake(strand)
        del self._waiting[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """threading.Event in virtual time."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Strand] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        kernel = _KERNEL[0]
        if kernel is not None and not kernel.is_over:
            for strand in self._waiting:
                kernel.wake(strand)
        self._waiting.clear()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        kernel, me = _KERNEL[0], _running_strand()
        assert kernel is not None and me is not None
        end_s = None if timeout is None else kernel.now_s + timeout
        while not self._is_set:
            left_s = None if end_s is None else end_s - kernel.now_s
            if left_s is not None and left_s <= 0:
                break
            if me not in self._waiting:
                self._waiting.append(me)
            kernel.park(left_s, "an event")
        return self._is_set


class Thread:
    """threading.Thread as a strand of the process that starts it."""

    def __init__(
        self, group: None = None, target: Any = None, name: str | None = None, args: Any = (), kwargs: Any = None,
        *, daemon: bool | None = None,
    ) -> None:  # fmt: skip
        self.name, self.daemon, self._work = name or "thread", daemon, lambda: target(*args, **(kwargs or {}))
        self._strand: Strand | None = None
        self._ended = Event()

    def start(self) -> None:
        kernel = _KERNEL[0]
        assert kernel is not None and kernel.current_process is not None

        def work() -> None:
            try:
                self._work()
            finally:
                self._ended.set()

        self._strand = kernel.spawn(kernel.current_process, work, self.name)
        self._strand.thread = self

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return self._strand is not None and not self._ended.is_set()

    @property
    def ident(self) -> int:
        return id(self)


class Timer(Thread):
    """threading.Timer."""

    def __init__(self, interval: float, function: Callable[[], Any]) -> None:
        self._cancelled = Event()
        super().__init__(target=lambda: None if self._cancelled.wait(interval) else function(), name="timer")

    def cancel(self) -> None:
        self._cancelled.set()


class Executor:
    """ThreadPoolExecutor: a strand for each task."""

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "pool", **_: Any) -> None:
        self._name = thread_name_prefix
        self._threads: list[Thread] = []

    def submit(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                result = function(*args, **keywords)
            except GreenletExit:
                raise
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever asks the future
                future.set_exception(error)
            else:
                future.set_result(result)

        thread = Thread(target=work, name=self._name)
        self._threads.append(thread)
        thread.start()
        return future

    def shutdown(self, wait: bool = True, **_: Any) -> None:
        for thread in self._threads if wait else ():
            thread.join()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class _Selector:
    """Selector of an event loop that waits in virtual time."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        kernel, loop = _KERNEL[0], self._loop
        assert kernel is not None
        if loop.was_woken or (timeout is not None and timeout <= 0):
            loop.was_woken = False
            return []
        loop.sleeper = kernel.current
        try:
            kernel.park(timeout, "the event loop's next event")
        except GreenletExit:  # the end of the schedule; whoever serves the loop would restart
            loop._stopping = True
        loop.sleeper, loop.was_woken = None, False
        return []


class _Task(asyncio.Task):
    """A task whose place in a set does not depend on its address."""

    _numbers = iter(range(1 << 60))

    def __init__(self, *args: Any, **keywords: Any) -> None:
        self._number = next(_Task._numbers)
        super().__init__(*args, **keywords)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class Loop(asyncio.BaseEventLoop):
    """An event loop in virtual time."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Selector(self)
        self.sleeper: Any = None
        self.was_woken = False
        self.set_task_factory(lambda loop, work, **keywords: _Task(work, loop=loop, **keywords))
        self.set_exception_handler(lambda loop, context: None)

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        kernel = _KERNEL[0]
        self.was_woken = True
        if self.sleeper is not None and kernel is not None and not kernel.is_over:
            kernel.wake(self.sleeper)

    def time(self) -> float:
        kernel = _KERNEL[0]
        return 0.0 if kernel is None else kernel.monotonic()


def current_thread() -> Any:
    strand = _running_strand()
    return None if strand is None else strand.thread


def patch_standard_library(patches: Patches) -> None:
    """Redirect every wait and every reading of a clock to the kernel."""
    real_monotonic, real_time, real_sleep = time.monotonic, time.time, time.sleep
    patches.set(time, "monotonic", lambda: k.monotonic() if (k := _KERNEL[0]) else real_monotonic())
    patches.set(time, "perf_counter", time.monotonic)
    patches.set(time, "time", lambda: k.wall_time() if (k := _KERNEL[0]) else real_time())
    patches.set(time, "sleep", lambda s: k.sleep(s) if (k := _KERNEL[0]) else real_sleep(s))
    for name, fake in (
        ("Lock", Lock), ("RLock", RLock), ("Condition", Condition), ("Event", Event), ("Thread", Thread),
        ("Timer", Timer), ("current_thread", current_thread),
    ):  # fmt: skip
        patches.set(threading, name, fake)
    patches.set(asyncio, "new_event_loop", Loop)
