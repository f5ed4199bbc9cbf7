"""Run schedules of faults against the whole control plane, in virtual time.

python -m tests.simulator --schedules 1000 --seed 0        seeds 0 to 999, on two cores
python -m tests.simulator --schedules 100000 --workers 16 --out failures.json
python -m tests.simulator --story 17                       one seed, told as a story and shrunk when it fails
python -m tests.simulator --bugs                           bugs of the past, put back one at a time
python -m tests.simulator --past                           schedules that once failed
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
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from slime.utils.atomic_file import replace_file
from tests.simulator.faults import NUM_SETUPS

CHUNK = 10
"""Schedules that a worker takes at once; all of one job, where there are as many."""
REAL_TIME_S = 300
"""A schedule that takes longer does not come to its end at all."""
WRITE_EVERY_S = 10.0
STORY_LINES = 40
"""Of a failure that are printed; the file has all."""
MAX_BREAKS = 5
"""Deaths of workers after which the rest is left."""


_FOR_LIFE = ExitStack()


class RealTimeError(BaseException):
    """A schedule takes too long outside of virtual time; no ``except Exception`` of the control plane may catch it."""


def main() -> int:
    """Return the exit status: 1 when a schedule failed, or a bug was not found."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="The first seed.")
    parser.add_argument("--workers", type=int, default=2, help="Processes; one a core.")
    parser.add_argument("--story", type=int, help="Tell and shrink this seed.")
    parser.add_argument("--bugs", action="store_true", help="Put bugs of the past back and look for them.")
    parser.add_argument("--past", action="store_true", help="Run the schedules that once failed.")
    parser.add_argument("--bug", default="", help="Only those whose name contains this.")
    parser.add_argument("--limit-s", type=float, default=1e6, help="Seconds of real time for --bugs, then it ends.")
    parser.add_argument(
        "--out",
        type=Path,
        help="Keep counts and failures in this JSON file (or simulator.json in this folder) while the schedules run.",
    )
    options = parser.parse_args()
    if options.out is not None and not options.out.suffix:
        options.out.mkdir(parents=True, exist_ok=True)
        options.out /= "simulator.json"
    if options.story is not None:
        return tell(options.story)
    if options.past:
        return run_past()
    if options.bugs:
        import tests.simulator.runner  # noqa: F401 - once, for all workers
        from tests.simulator.bugs import Search

        return Search(options).run()
    return run_many(options)


def run_past() -> int:
    """Run the schedules that once failed; all faults of each must strike, and a run that tolerates them must go on."""
    from tests.simulator.past import PAST
    from tests.simulator.runner import installed, run_schedule

    num_failed = 0
    with installed():
        for name, (seed, setup, faults) in PAST.items():
            outcome = run_schedule(seed, setup, faults)
            problems = outcome.violations or ["a fault did not strike"] * (outcome.num_fired < len(faults))
            problems = problems or ["the run did not go on"] * (outcome.num_lives > 1 and setup.fault_tolerance)
            num_failed += bool(problems)
            print(f"{name}: {'; '.join(problems) or 'ok'}", flush=True)
    return int(num_failed > 0)


def tell(seed: int) -> int:
    """Print the story of a seed; of one that fails, the shortest."""
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
    print(f"{outcome.num_lives} lives, {outcome.virtual_s:.0f} s, {outcome.num_events} events, {outcome.digest:08x}")
    for violation in outcome.violations:
        print(f"VIOLATION {violation}")
    return int(bool(outcome.violations))


def begin_worker() -> None:
    """Put the simulator at every seam of this process, for as long as it lives."""
    from tests.simulator.runner import installed

    def on_alarm(signum: int, frame: FrameType | None) -> None:
        raise RealTimeError(f"not over after {REAL_TIME_S} s of real time")

    signal.signal(signal.SIGALRM, on_alarm)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    _FOR_LIFE.enter_context(installed())


def run_chunk(seeds: list[int]) -> list[dict[str, Any]]:
    """Run some seeds in a worker."""
    return [run_one(seed) for seed in seeds]


def run_one(seed: int) -> dict[str, Any]:
    """Run one seed; an error of the simulator is a failure too."""
    from tests.simulator.runner import run_seed

    signal.alarm(REAL_TIME_S)
    try:
        outcome = run_seed(seed)
    except (Exception, RealTimeError) as error:  # noqa: BLE001 - the other seeds go on
        lines = traceback.format_exc().splitlines()
        counts = {"lives": 0, "fired": 0, "events": 0}
        return {"seed": seed, "violations": [f"{type(error).__name__}: {error}"], "story": lines, **counts}
    finally:
        signal.alarm(0)
    return {
        "seed": seed, "violations": outcome.violations, "lives": outcome.num_lives, "fired": outcome.num_fired,
        "events": outcome.num_events, "story": outcome.story if outcome.violations else [],
    }  # fmt: skip


class Tally:
    """Counts and failures so far; the file has them at any time."""

    def __init__(self, first_seed: int, path: Path | None) -> None:
        self._first_seed, self._path = first_seed, path
        self._began_s, self._written_s = time.monotonic(), 0.0
        self._counts = {"schedules": 0, "lives": 0, "faults": 0, "events": 0}
        self.failures: list[dict[str, Any]] = []

    def add(self, result: dict[str, Any]) -> None:
        """Take a result in; print it where it is a failure."""
        for name, value in (("schedules", 1), ("lives", result["lives"]), ("faults", result["fired"])):
            self._counts[name] += value
        self._counts["events"] += result["events"]
        if result["violations"]:
            self.failures.append(
                {"seed": result["seed"], "message": result["violations"][0], "story": result["story"]}
            )
            print(f"seed {result['seed']}: {' '.join(result['violations'][0][:300].split())}", flush=True)
            print("\n".join(f"    {line[:200]}" for line in result["story"][-STORY_LINES:]), flush=True)
        if result["violations"] or time.monotonic() - self._written_s > WRITE_EVERY_S:
            self.write()

    def summary(self) -> dict[str, Any]:
        """Return what the file has."""
        seconds = time.monotonic() - self._began_s
        return {
            "first_seed": self._first_seed, **self._counts, "seconds": round(seconds, 1),
            "schedules_a_minute": round(60 * self._counts["schedules"] / seconds),
            "failed": sorted(self.failures, key=lambda failure: failure["seed"]),
        }  # fmt: skip

    def table(self) -> str:
        """Return the summary for people."""
        summary = self.summary()
        seeds = [str(failure["seed"]) for failure in summary["failed"]]
        rows = summary | {"failed": f"{len(seeds)} {' '.join(seeds)}".rstrip()}
        return "\n".join(f"{name.replace('_', ' '):20}{value:>14}" for name, value in rows.items())

    def write(self) -> None:
        """Put the file in place whole."""
        self._written_s = time.monotonic()
        if self._path is not None:
            content = (json.dumps(self.summary(), indent=1) + "\n").encode()
            replace_file(self._path, lambda file: file.write(content), to_disk=False)


def in_order(first: int, count: int) -> list[list[int]]:
    """Return seeds in chunks of one job where there are as many: its undisturbed run is made once for several."""
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
    """Run many seeds on several cores, and print those that fail."""
    import tests.simulator.runner  # noqa: F401 - once, for all workers

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tally, left = Tally(options.seed, options.out), in_order(options.seed, options.schedules)
    try:
        for _ in range(MAX_BREAKS):
            left = run_chunks(left, options.workers, tally)
            if not left:
                break
            print(f"a worker died; {len(left)} chunks of {CHUNK} schedules are left", flush=True)
    except KeyboardInterrupt:
        print("cut off", flush=True)
    tally.write()
    summary = tally.summary()
    print(tally.table())
    print(json.dumps(summary | {"failed": [failure["seed"] for failure in summary["failed"]]}))
    return int(bool(tally.failures or left))


def run_chunks(chunks: list[list[int]], workers: int, tally: Tally) -> list[list[int]]:
    """Run chunks of seeds; return those that are left when a worker dies."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=begin_worker) as pool:
        running = {pool.submit(run_chunk, chunk): chunk for chunk in chunks}
        try:
            for future in as_completed(running):
                for result in future.result():
                    tally.add(result)
                del running[future]
        except KeyboardInterrupt:
            for worker in list(pool._processes.values()):  # they would go through all that is left
                worker.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        except BrokenProcessPool:
            pass
    return list(running.values())


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of texts have one order then: a seed is one story
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulator", *sys.argv[1:]])
    gc.disable()  # modules are no garbage; schedules collect theirs
    sys.exit(main())
