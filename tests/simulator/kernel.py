"""Virtual time: strands (greenlets) instead of threads, simulated processes, and the event queue.

Only one strand runs at a time; when it waits, the clock jumps to the next event.  The order of events at one moment is
drawn from the seed.  A killed process never runs again, not even its ``finally`` blocks, as with
SIGKILL.
"""

from __future__ import annotations

import random
import zlib
from asyncio import _get_running_loop, _set_running_loop
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

EPOCH_S = 1_700_000_000.0
TICK_S = 1e-6
"""Every reading of the clock takes this long, so that a loop that only reads it also reaches its deadline."""


_KERNEL: list[Kernel | None] = [None]
"""The kernel that waits use, while a schedule runs."""
WORLD: list[Any] = [None]
"""The running schedule."""
_MISSING = object()


class StuckError(AssertionError):
    """No events are left, or the job's time limit has passed."""


class Process:
    """A simulated process: strands that share module globals and live and die together."""

    def __init__(self, kernel: Kernel, name: str, *, owner: Process | None = None) -> None:
        self.kernel, self.name, self.owner = kernel, name, owner
        self.is_alive = True
        self.frozen_until_s = 0.0
        """Time until which it is stopped (SIGSTOP, a hanging GPU)."""
        self.globals: list[Any] = []
        """Its values of per-process module globals, while other processes run."""
        self.singletons: dict[type, Any] = {}
        self.owned: list[Process] = []
        self.on_death: dict[Callable[[], None], None] = {}
        """Called when it is killed, in order of registration."""
        self.end_s: float | None = None
        kernel.processes.append(self)
        if owner is not None:
            owner.owned.append(self)

    def kill(self, *, heirs_after_s: tuple[float, float] = (0.0, 2.0)) -> None:
        """Kill it; its owned processes end a little later."""
        if not self.is_alive:
            return
        self.is_alive, self.end_s = False, self.kernel.now_s
        for callback in list(self.on_death):
            callback()
        for heir in self.owned:
            if heir.is_alive:
                self.kernel.call_later(self.kernel.draw(f"heir {heir.name}", *heirs_after_s), heir.kill)
        if self.kernel.current_process is self:
            self.kernel.park_for_ever()

    def __repr__(self) -> str:
        return self.name


class _Carrier(greenlet):
    """A greenlet that runs one strand after another, because creating one costs more than most strands."""

    strand: Strand

    def run(self) -> None:
        while True:
            strand = self.strand
            strand.work_guarded()
            strand.dead, strand.carrier = True, None
            self.gr_context = None
            _IDLE.append(self)
            strand.kernel.hub.switch()


_IDLE: list[_Carrier] = []
"""Carriers whose strand has ended."""


class Strand:
    """A thread of a simulated process."""

    __slots__ = ("_work", "carrier", "dead", "kernel", "name", "process", "thread", "token", "waits_for")

    def __init__(self, kernel: Kernel, process: Process, work: Callable[[], Any], name: str) -> None:
        self.kernel, self.process, self.name, self._work = kernel, process, name, work
        self.token = 0
        self.waits_for: Any = ""
        """A text, seconds, or what is named in a list."""
        self.thread: Any = None
        self.carrier: _Carrier | None = None
        """The greenlet that runs it, from its first event on."""
        self.dead = False

    def work_guarded(self) -> None:
        try:
            self._work()
        except GreenletExit:
            return
        except BaseException as error:  # noqa: BLE001 - the edge of a simulated thread
            if not self.kernel.is_over:
                self.kernel.escaped.append((self.name, error))


class Kernel:
    """The clock, the event queue, and the only source of randomness.

    Args:
        seed: seed of all randomness.
        globals_of_process: (module, name, maker) of globals with a separate value for each process.
        singletons: classes with separate ``_instances`` for each process.
    """

    def __init__(
        self,
        seed: int,
        globals_of_process: Sequence[tuple[Any, str, Callable[[], Any]]] = (),
        singletons: Any = None,
    ) -> None:
        self.seed = seed
        self.now_s = 0.0
        self.wall_shift_s = 0.0
        """Jumps of the wall clock, which no deadline may depend on."""
        self.hub = getcurrent()
        self.processes: list[Process] = []
        self.escaped: list[tuple[str, BaseException]] = []
        self.is_over = False
        self.num_events = 0
        self.horizon_s = float("inf")
        self.current: Strand | None = None
        """The running process."""
        self.strands: dict[Strand, None] = {}
        self._makers = [maker for _, _, maker in globals_of_process]
        self._slots = [(vars(module), name) for module, name, _ in globals_of_process]
        self._singletons = singletons
        self._heap: list[tuple[float, float, int, Any, int]] = []
        self._number = 0
        self._rngs: dict[str, random.Random] = {}
        self._order = random.Random(seed * 7919 + 1).random
        self._loaded: Process | None = None
        self._is_stopped = False

    # Chance

    def rng(self, site: str) -> random.Random:
        """Return the generator of one place, so that removing a fault changes little elsewhere."""
        found = self._rngs.get(site)
        if found is None:
            found = self._rngs[site] = random.Random(self.seed * 1_000_003 ^ zlib.crc32(site.encode()))
        return found

    def draw(self, site: str, low: float, high: float) -> float:
        """Return a random number in a range, often near its lower end."""
        rng = self._rngs.get(site) or self.rng(site)
        return low + (high - low) * rng.random() ** 3  # type: ignore[no-any-return]

    # Events

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call back after a time, outside any process."""
        self._number += 1
        heappush(self._heap, (self.now_s + delay_s, self._order(), self._number, callback, -1))

    def spawn(self, process: Process, work: Callable[[], Any], name: str, delay_s: float = 0.0) -> Strand:
        strand = Strand(self, process, work, f"{process.name}/{name}")
        self.strands[strand] = None
        self._push(strand, delay_s)
        return strand

    def _push(self, strand: Strand, delay_s: float) -> None:
        self._number += 1
        heappush(self._heap, (self.now_s + delay_s, self._order(), self._number, strand, strand.token))

    def strands_of(self, process: Process, name: str) -> list[Strand]:
        """Return the strands of a process with a name."""
        found = [strand for strand in self.strands if strand.process is process and not strand.dead]
        return sorted((s for s in found if s.name == f"{process.name}/{name}"), key=lambda s: s.token)

    def wake(self, strand: Strand) -> None:
        self._push(strand, 0.0)

    def park(self, timeout_s: float | None, waits_for: Any) -> bool:
        """Wait until somebody wakes this strand; return False after ``timeout_s``."""
        strand = self.current
        if self.is_over:
            raise GreenletExit
        assert strand is not None, f"{waits_for}: a wait outside the simulation"
        strand.waits_for = waits_for
        if timeout_s is None:
            self._yield(strand)
            return True
        if timeout_s < 0.0:
            timeout_s = 0.0
        deadline_s = self.now_s + timeout_s
        self._number += 1
        heappush(self._heap, (deadline_s, self._order(), self._number, strand, strand.token))
        self._yield(strand)
        return self.now_s < deadline_s

    def _yield(self, strand: Strand) -> None:
        loop = _get_running_loop()
        if loop is not None:
            _set_running_loop(None)
        self.hub.switch()
        strand.token += 1
        if self.is_over:
            raise GreenletExit
        if loop is not None:
            _set_running_loop(loop)

    def park_for_ever(self) -> None:
        strand = self.current
        if strand is not None:
            strand.token += 1
            if _get_running_loop() is not None:
                _set_running_loop(None)
            self.hub.switch()
        raise GreenletExit

    @property
    def current_process(self) -> Process | None:
        return None if self.current is None else self.current.process

    def stop(self) -> None:
        """Make :meth:`run` return."""
        self._is_stopped = True

    def run(self) -> None:
        """Process events until one calls :meth:`stop`.

        Raises:
            StuckError: no events are left, or the time limit has passed.
        """
        heap, self._is_stopped = self._heap, False
        while not self._is_stopped:
            if not heap:
                raise StuckError(f"nothing can happen any more\n{self.describe_waits()}")
            when_s, _, _, target, token = heappop(heap)
            if token == -1:
                if when_s > self.now_s:
                    self.now_s = when_s
                target()
            elif target.token == token and not target.dead and target.process.is_alive:
                self._resume(when_s, target)

    def _resume(self, when_s: float, strand: Strand) -> None:
        process = strand.process
        if when_s < self.now_s:
            when_s = self.now_s
        if process.frozen_until_s > when_s:
            self._number += 1
            event = (process.frozen_until_s, self._order(), self._number, strand, strand.token)
            heappush(self._heap, event)
            return
        self.now_s = when_s
        if when_s > self.horizon_s:
            raise StuckError(f"not over after {self.horizon_s:.0f} s\n{self.describe_waits()}")
        self.num_events += 1
        if process is not self._loaded:
            self._load(process)
        carrier = strand.carrier
        if carrier is None:
            carrier = strand.carrier = _IDLE.pop() if _IDLE else _Carrier()
            carrier.strand = strand
        self.current = strand
        carrier.switch()
        self.current = None
        if strand.dead:
            del self.strands[strand]
        if self.escaped:
            name, error = self.escaped[0]
            raise AssertionError(f"an error left a thread of {name}: {type(error).__name__}: {error}") from error

    def _load(self, process: Process | None) -> None:
        """Load the module globals of a process into the modules."""
        before, slots, singletons = self._loaded, self._slots, self._singletons
        if before is not None:
            before.globals = [names[name] for names, name in slots]
            before.singletons = singletons._instances
        if process is not None:
            if not process.globals:
                process.globals = [make() for make in self._makers]
            for (names, name), value in zip(slots, process.globals):  # noqa: B905 - this is run for most events
                names[name] = value
            singletons._instances = process.singletons
        self._loaded = process

    def describe_waits(self) -> str:
        alive = sorted((s for s in self.strands if not s.dead and s.process.is_alive), key=lambda s: s.name)
        return "\n".join(f"  {strand.name} waits for {_describe(strand.waits_for)}" for strand in alive)

    def close(self) -> None:
        self.is_over = True
        for strand in list(self.strands):
            while strand.carrier is not None:
                self.current = strand
                strand.carrier.throw(GreenletExit)
        self.current = None
        self.strands.clear()

    # The standard library's waits

    def monotonic(self) -> float:
        self.now_s += TICK_S
        return self.now_s

    def wall_time(self) -> float:
        """Return the time of the wall clock, which may jump."""
        return EPOCH_S + self.now_s + self.wall_shift_s

    def sleep(self, seconds: float) -> None:
        self.park(seconds, seconds)


def _describe(waits_for: Any) -> str:
    if isinstance(waits_for, list):
        return ", ".join(map(repr, waits_for))
    return waits_for if isinstance(waits_for, str) else f"{waits_for:g} s to pass"


class Patches:
    """Attributes replaced while simulations run in this process."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, holder: Any, name: str, value: Any) -> None:
        before = vars(holder).get(name, _MISSING) if isinstance(holder, type) else getattr(holder, name, _MISSING)
        self._before.append((holder, name, before))
        setattr(holder, name, value)

    def undo(self) -> None:
        for holder, name, value in reversed(self._before):
            if value is _MISSING:
                delattr(holder, name)
            else:
                setattr(holder, name, value)
        self._before.clear()


@contextmanager
def running(kernel: Kernel) -> Iterator[Kernel]:
    """Make waits use ``kernel``."""
    _KERNEL[0] = kernel
    try:
        yield kernel
    finally:
        try:
            kernel.close()
        finally:
            kernel._load(None)
            _KERNEL[0] = None
