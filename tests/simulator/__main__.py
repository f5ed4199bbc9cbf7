"""Run schedules of faults against the whole control plane, in virtual time.

python -m tests.simulator --schedules 1000 --seed 0        seeds 0 to 999, on two cores
python -m tests.simulator --story 17                       one seed as a story, shrunk if it fails
python -m tests.simulator --bugs                           past bugs, put back one at a time
python -m tests.simulator --suite                          what `make test` checks, as JSON
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from types import FrameType
from typing import Any

from tests.simulator.faults import NUM_SETUPS

CHUNK = 10
"""Schedules that a worker takes at once; all of one job, if there are enough."""
REAL_TIME_S = 300
"""Seconds after which a schedule counts as endless."""
STORY_LINES = 40
"""Number of printed lines of a failure."""
SUITE_SEEDS = range(1_000_000, 1_000_050)

_FOR_LIFE = ExitStack()


class RealTimeError(BaseException):
    """A schedule runs too long in real time; no ``except Exception`` of the control plane may catch it."""


def main() -> int:
    """Return the exit code: 1 if a schedule failed, or a bug was not found."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="The first seed.")
    parser.add_argument("--workers", type=int, default=2, help="Processes; one a core.")
    parser.add_argument("--story", type=int, help="Tell and shrink this seed.")
    parser.add_argument("--bugs", action="store_true", help="Put bugs of the past back and look for them.")
    parser.add_argument("--suite", action="store_true", help="Print what the suite looks at as JSON.")
    options = parser.parse_args()
    if options.story is not None:
        return tell(options.story)
    if options.suite:
        print(json.dumps(suite()))
        return 0
    import tests.simulator.runner  # noqa: F401 - once, for all workers

    return (find_bugs if options.bugs else run_many)(options)


def suite() -> dict[str, Any]:
    """Return the outcomes that ``test_simulator`` judges."""
    from tests.simulator import world
    from tests.simulator.bugs import BUGS, find
    from tests.simulator.drivers import one_rollout_ahead, synchronous
    from tests.simulator.faults import Setup
    from tests.simulator.past import PAST
    from tests.simulator.runner import installed, run_schedule, run_seed

    with installed():
        past = {}
        for name, (seed, setup, faults) in PAST.items():
            outcome = run_schedule(seed, setup, faults)
            went_on = outcome.num_lives == 1 or not setup.fault_tolerance
            past[name] = outcome.violations, outcome.num_fired == len(faults), went_on
        slices = [run_one(seed) for seed in SUITE_SEEDS]
        stories = [run_seed(10).story for _ in range(2)]
        drivers = {}
        for driver, setup in ((synchronous, Setup(colocate=True)), (one_rollout_ahead, Setup(is_async=True))):
            world.train.train = world.train_async.train = driver.train
            outcome = run_schedule(1, setup, [])
            drivers[driver.__name__.rpartition(".")[2]] = outcome.violations, outcome.story
    return {
        "past": past, "slices": slices, "stories": stories, "drivers": drivers,
        "bug": find(next(iter(BUGS)), range(400)),
    }  # fmt: skip


def tell(seed: int) -> int:
    """Print the story of a seed; if it fails, the shortest one."""
    from tests.simulator.runner import installed, run_schedule, schedule_of, shrink

    with installed():
        setup, faults = schedule_of(seed)
        outcome = run_schedule(seed, setup, faults)
        if outcome.violations:
            setup, faults, outcome = shrink(seed)
    print(setup)
    for fault in faults:
        print(fault)
    print("\n".join(outcome.story))
    print(f"{outcome.num_lives} lives, {outcome.virtual_s:.0f} s, {outcome.num_events} events")
    for violation in outcome.violations:
        print(f"VIOLATION {violation}")
    return int(bool(outcome.violations))


def begin_worker() -> None:
    """Install the simulator at every seam of this process, permanently."""
    from tests.simulator.runner import installed

    def on_alarm(signum: int, frame: FrameType | None) -> None:
        raise RealTimeError(f"not over after {REAL_TIME_S} s of real time")

    signal.signal(signal.SIGALRM, on_alarm)
    _FOR_LIFE.enter_context(installed())


def run_chunk(seeds: list[int]) -> list[dict[str, Any]]:
    return [run_one(seed) for seed in seeds]


def run_one(seed: int) -> dict[str, Any]:
    """Run one seed; an error of the simulator also counts as a failure."""
    from tests.simulator.runner import run_seed

    signal.alarm(REAL_TIME_S)
    try:
        outcome = run_seed(seed)
    except (Exception, RealTimeError) as error:  # noqa: BLE001 - the other seeds go on
        lines = traceback.format_exc().splitlines()
        return {
            "seed": seed,
            "violations": [f"{type(error).__name__}: {error}"],
            "story": lines,
            "lives": 0,
            "faults": 0,
        }
    finally:
        signal.alarm(0)
    return {
        "seed": seed, "violations": outcome.violations, "lives": outcome.num_lives, "faults": outcome.num_fired,
        "story": outcome.story if outcome.violations else [],
    }  # fmt: skip


def in_order(first: int, count: int) -> list[list[int]]:
    """Return seeds in chunks of one job, if there are enough, so that its undisturbed run is shared."""
    block = CHUNK * NUM_SETUPS
    jobs: dict[tuple[int, int], list[int]] = {}
    for seed in range(first, first + count):
        jobs.setdefault(((seed - first) // block, seed % NUM_SETUPS), []).append(seed)
    chunks: list[list[int]] = [[]]
    for _, seeds in sorted(jobs.items()):
        if len(chunks[-1]) + len(seeds) > CHUNK:
            chunks.append([])
        chunks[-1] += seeds
    return [chunk for chunk in chunks if chunk]


def run_many(options: argparse.Namespace) -> int:
    """Run many seeds on several cores, and print failures."""
    began_s, totals, failed = time.monotonic(), {"schedules": 0, "lives": 0, "faults": 0}, []
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(options.workers, mp_context=context, initializer=begin_worker) as pool:
        for results in pool.map(run_chunk, in_order(options.seed, options.schedules)):
            for result in results:
                totals["schedules"] += 1
                totals["lives"] += result["lives"]
                totals["faults"] += result["faults"]
                if result["violations"]:
                    failed.append(result["seed"])
                    print(f"seed {result['seed']}: {' '.join(result['violations'][0][:300].split())}", flush=True)
                    print("\n".join(f"    {line[:200]}" for line in result["story"][-STORY_LINES:]), flush=True)
    print(json.dumps({**totals, "seconds": round(time.monotonic() - began_s), "failed": failed}))
    return int(bool(failed))


def find_bugs(options: argparse.Namespace) -> int:
    """Look for every bug on several cores; return 1 if one was not found."""
    from tests.simulator.bugs import BUGS, LIMIT, find

    seeds = range(options.seed, options.seed + min(options.schedules, LIMIT))
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("fork")) as pool:
        found = {bug: pool.submit(find, bug, seeds) for bug in BUGS}
        for bug, future in found.items():
            row = future.result()
            print(f"{bug}: {json.dumps(row) if row else 'NOT FOUND'}", flush=True)
    return int(any(future.result() is None for future in found.values()))


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # fixes the order of sets of strings, so that a seed is one story
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulator", *sys.argv[1:]])
    gc.disable()  # modules are not garbage; schedules collect theirs
    sys.exit(main())
