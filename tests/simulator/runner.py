"""Runs schedules in one process, and shrinks failing ones."""

from __future__ import annotations

import dataclasses
import gc
import logging
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slime.utils.misc import SingletonMeta
from tests.simulator.faults import (
    Fault,
    Setup,
    draw_faults,
    draw_faults_of_recovery,
    first_of_recovery,
    setup_of,
    strikes_recovery,
)
from tests.simulator.kernel import WORLD, Kernel, Patches, running
from tests.simulator.network import AsyncSession, SyncSession
from tests.simulator.seams import install, process_globals
from tests.simulator.world import Outcome, World

MEMORY = Path("/dev/shm")
COLLECT_EVERY = 400
"""Number of schedules after which all garbage is collected; after each, only the youngest generation."""

_INSTALLED: list[Patches] = []
_UNDISTURBED: dict[Setup, Outcome] = {}


@contextmanager
def installed() -> Iterator[None]:
    """Simulate within the block; outside it this process is an ordinary one."""
    if _INSTALLED:
        yield
        return
    level, was_collecting = logging.root.manager.disable, gc.isenabled()
    patches = install()
    patches.set(SingletonMeta, "_instances", SingletonMeta._instances)
    patches.set(sys, "unraisablehook", lambda unraisable: None)  # coroutines of killed processes end at some time
    for holder, name, _ in process_globals():
        patches.set(holder, name, getattr(holder, name))
    _INSTALLED.append(patches)
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        _INSTALLED.clear()
        gc.collect()
        patches.undo()
        logging.disable(level)
        gc.unfreeze()
        if was_collecting:
            gc.enable()


def run_schedule(seed: int, setup: Setup, faults: Sequence[Fault], *, ends_with_recovery: bool = False) -> Outcome:
    """Run one schedule, or the part until the recovery from its first fault is over."""
    folder = Path(tempfile.mkdtemp(prefix="slime-sim-", dir=MEMORY if MEMORY.is_dir() else None))
    random_state = random.getstate()
    random.seed(seed)
    kernel = Kernel(seed, process_globals(), SingletonMeta)
    now = WORLD[0] = World(setup, list(faults), folder, kernel)
    SyncSession.world = AsyncSession.world = now
    now.cluster.name_of_class = {
        "RolloutManager": lambda a, k: "manager", "EngineActor": lambda a, k: f"engine{k['rank']}",
        "SimulatedTrainer": lambda a, k: "trainer", "_Lock": lambda a, k: "lock",
    }  # fmt: skip
    try:
        with running(kernel):
            return now.run(ends_with_recovery=ends_with_recovery)
    finally:
        now.files.close()
        random.setstate(random_state)
        shutil.rmtree(folder, ignore_errors=True)
        WORLD[0] = SyncSession.world = AsyncSession.world = None
        now.forget()
        gc.collect(0)  # reused memory is faster than new memory


def undisturbed(setup: Setup) -> Outcome:
    """Return the run of a job without faults."""
    found = _UNDISTURBED.get(setup)
    if found is None:
        found = _UNDISTURBED[setup] = run_schedule(0, setup, [])
    return found


def schedule_of(seed: int) -> tuple[Setup, list[Fault]]:
    setup = setup_of(seed)
    plain = undisturbed(setup)
    faults = draw_faults(seed, setup, plain.sites, plain.virtual_s - 30.0)
    if strikes_recovery(seed):
        faults = [first_of_recovery(seed, faults[0])]
        first = run_schedule(seed, setup, faults, ends_with_recovery=True)
        faults = faults + draw_faults_of_recovery(seed, setup, first.recovery_sites, _new_sites(first, plain))
    return setup, faults


def _new_sites(first: Outcome, plain: Outcome) -> dict[str, tuple[int, int]]:
    """Return the sites that only a run's recovery passes: in new processes, or more often than an undisturbed run."""
    more = {
        site: (max(before, plain.sites[site]), after)
        for site, (before, after) in first.recovery_sites.items()
        if after > plain.sites[site]
    }
    return more | first.replaced_sites


def run_seed(seed: int) -> Outcome:
    setup, faults = schedule_of(seed)
    outcome = run_schedule(seed, setup, faults)
    if seed % COLLECT_EVERY == 0:
        gc.collect()
    return outcome


def shrink(seed: int) -> tuple[Setup, list[Fault], Outcome]:
    """Return the smallest job and the fewest faults with which the seed's schedule still fails."""
    setup, faults = schedule_of(seed)
    best = run_schedule(seed, setup, faults)
    assert best.violations, f"seed {seed} does not fail"

    def fails(new_setup: Setup, new_faults: list[Fault]) -> bool:
        nonlocal setup, faults, best
        outcome = run_schedule(seed, new_setup, new_faults)
        if not outcome.violations:
            return False
        setup, faults, best = new_setup, new_faults, outcome
        return True

    index = 0
    while index < len(faults):
        if not fails(setup, faults[:index] + faults[index + 1 :]):
            index += 1
    plain = Setup()
    for spec in dataclasses.fields(Setup):
        value = getattr(plain, spec.name)
        if getattr(setup, spec.name) != value:
            fails(dataclasses.replace(setup, **{spec.name: value}), faults)
    for fewer in range(1, setup.num_rollout):
        if fails(dataclasses.replace(setup, num_rollout=fewer), faults):
            break
    return setup, faults, best
