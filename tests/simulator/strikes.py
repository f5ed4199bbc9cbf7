"""The faults of one schedule: the points where they wait, and their effects on processes, network, disk and clock."""

from __future__ import annotations

import functools
import signal
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime.ray.waiting import sigterm
from tests.simulator.faults import DISK_FAULTS, WRONG_ANSWERS, Fault
from tests.simulator.kernel import Process

if TYPE_CHECKING:
    from tests.simulator.world import World

AFTER_GRACE_S = 90.0
"""Seconds from the end of the grace period to the end of a process that got SIGTERM."""
RECOVERY_S = 60.0
"""Seconds after a fault in which others strike the recovery from it."""


class Strikes:
    """Counts how often each site is passed, and triggers the faults there.

    Args:
        world: the schedule.
        faults: all faults of the schedule.
    """

    def __init__(self, world: World, faults: Sequence[Fault]) -> None:
        self._world, self._kernel = world, world.kernel
        self.sites: Counter[str] = Counter()
        self.fired: list[tuple[Fault, float]] = []
        """Faults that struck, and the end of each."""
        self.in_life: list[Fault] = []
        """Faults that struck in the current life, or last into it."""
        self.had_early = False
        """One struck before the engines had weights; a job that cannot start ends."""
        self.replaced_sites: dict[str, tuple[int, int]] = {}
        """Like recovery_sites, for replacement processes."""
        self.is_recovery_over = False
        """RECOVERY_S after the first fault have passed."""
        self._before: Counter[str] = Counter()
        self._after: Counter[str] = Counter()
        self._by_site: dict[str, list[Fault]] = {}
        for fault in faults:
            if fault.site:
                self._by_site.setdefault(fault.site, []).append(fault)
            else:
                self._kernel.call_later(fault.at_s, functools.partial(self._strike, fault, None))

    def begin_life(self) -> None:
        now_s = self._kernel.now_s
        self.in_life = [fault for fault, until_s in self.fired if until_s > now_s and fault.kind != "slow"]
        self.had_early = any(fault.kind != "clock" for fault in self.in_life)

    @property
    def last_until_s(self) -> float:
        """The end of the last fault that struck."""
        return max((until_s for _, until_s in self.fired), default=0.0)

    @property
    def hit_the_disk(self) -> bool:
        return any(fault.kind in DISK_FAULTS for fault, _ in self.fired)

    @property
    def recovery_sites(self) -> dict[str, tuple[int, int]]:
        """Site -> how often it was passed until the first fault, and until RECOVERY_S later, if that is more."""
        before, after = self._before, self._after
        return {site: (before[site], after[site]) for site in after if after[site] > before[site]}

    def at(self, site: str, process: Process | None) -> str | None:
        """Pass a point; return what a fault there makes its caller do."""
        count = self.sites[site] = self.sites.get(site, 0) + 1
        if self.fired and not self.is_recovery_over and process is not None and "#" in process.name:
            self.replaced_sites[site] = self.replaced_sites.get(site, (count - 1, 0))[0], count
        outcome = None
        for fault in self._by_site.get(site, ()):
            if fault.nth == count:
                outcome = self._strike(fault, process) or outcome
        return outcome

    def _strike(self, fault: Fault, process: Process | None) -> str | None:
        """Trigger a fault; return what the place where it happens must do itself."""
        world, kernel = self._world, self._kernel
        lasts_s = fault.amount if fault.kind in ("hang", "cut", "full") else 0.0
        if not self.fired:
            self._before = self.sites.copy()
            kernel.call_later(RECOVERY_S, self.end_recovery)
        self.fired.append((fault, kernel.now_s + lasts_s))
        self.in_life.append(fault)
        self.had_early |= not world.is_started
        world.note(f"fault: {fault}")
        if fault.kind in WRONG_ANSWERS or fault.kind in ("half", "after", "ioerror"):
            return fault.kind
        if fault.kind == "clock":
            kernel.wall_shift_s += fault.amount
        elif fault.kind == "full":
            world.files.full_until_s = kernel.now_s + fault.amount
        elif fault.kind == "cut":
            world.cluster.cut_until_s[self._role(fault, process)] = kernel.now_s + fault.amount
        else:
            for target in self._targets(fault, process):
                self._hit(target, fault)
        return None

    def _hit(self, target: Process, fault: Fault) -> None:
        if fault.kind == "kill":
            target.kill()
        elif fault.kind == "hang":
            target.frozen_until_s = max(target.frozen_until_s, self._kernel.now_s + fault.amount)
        elif fault.kind == "term":
            self._announce_end(target)
        elif fault.kind == "slow":
            for server in self._world.servers.values():
                if server.process is target:
                    server.slowness = fault.amount

    def _announce_end(self, target: Process) -> None:
        """Send SIGTERM to the driver or a rank of its trainer, and SIGKILL some time after the grace."""
        kernel, rank = self._kernel, getattr(target, "trainer", None)
        if self._world.cluster.role_of(target) == "driver":
            sigterm()._on_signal(signal.SIGTERM, None)
        elif rank is None:  # it ignores signals so far
            target.kill()
            return
        else:
            rank._is_told_to_leave = True
            for strand in kernel.strands_of(target, "stay_alive"):
                kernel.wake(strand)
        kernel.call_later(self._world.setup.grace_s + AFTER_GRACE_S, target.kill)

    def end_recovery(self) -> None:
        if self.fired and not self.is_recovery_over:
            self._after.update(self.sites)
            self.is_recovery_over = True
            self._world.recovery_is_over()

    def _role(self, fault: Fault, process: Process | None) -> str:
        return self._world.cluster.role_of(process) if fault.target == "self" and process else fault.target

    def _targets(self, fault: Fault, process: Process | None) -> list[Process]:
        if fault.target == "self":
            return [process] if process is not None and process.is_alive else []
        role_of = self._world.cluster.role_of
        found = [p for p in self._kernel.processes if p.is_alive and role_of(p) == fault.target]
        own = self._kernel.current_process
        return sorted(found, key=lambda p: p is own)  # a process that hits itself comes last
