"""Run schedules of faults against the whole control plane, in virtual time.

python -m tests.simulator --schedules 1000 --seed 0        seeds 0 to 999, on two cores
python -m tests.simulator --story 17                       one seed, told as a story and shrunk when it fails
python -m tests.simulator --bugs                           bugs of the past, put back one at a time
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from typing import Any

SHOWN = 20
CHUNK = 25


def main() -> int:
    """Return the exit status: 1 when a schedule failed, or a bug was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="The first seed.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--story", type=int, help="Tell and shrink this seed.")
    parser.add_argument("--bugs", action="store_true", help="Put bugs of the past back and look for them.")
    parser.add_argument("--bug", default="", help="Only those whose name contains this.")
    parser.add_argument("--json", help="Write the result to this file.")
    options = parser.parse_args()
    if options.story is not None:
        return tell(options.story)
    if options.bugs:
        from tests.simulator.bugs import find_all

        return find_all(options)
    return run_many(options)


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


def run_chunk(seeds: range) -> list[dict[str, Any]]:
    """Run some seeds in this process."""
    from tests.simulator.runner import installed, run_seed

    results = []
    with installed():
        for seed in seeds:
            outcome = run_seed(seed)
            results.append(
                {
                    "seed": seed, "violations": outcome.violations, "digest": outcome.digest,
                    "lives": outcome.num_lives, "fired": outcome.num_fired, "events": outcome.num_events,
                }
            )  # fmt: skip
    return results


def run_many(options: argparse.Namespace) -> int:
    """Run many seeds on several cores, and print those that fail."""
    began_s, results = time.time(), []
    last = options.seed + options.schedules
    chunks = [range(first, min(first + CHUNK, last)) for first in range(options.seed, last, CHUNK)]
    with multiprocessing.get_context("fork").Pool(options.workers) as pool:
        for chunk in pool.imap_unordered(run_chunk, chunks):
            results += chunk
            for result in chunk:
                if result["violations"]:
                    print(f"seed {result['seed']}: {result['violations'][0][:300]}", flush=True)
    seconds = time.time() - began_s
    failed = sorted(result["seed"] for result in results if result["violations"])
    summary = {
        "schedules": len(results), "first_seed": options.seed, "failed": failed, "seconds": round(seconds, 1),
        "schedules_a_minute": round(60 * len(results) / seconds), "lives": sum(r["lives"] for r in results),
        "faults": sum(r["fired"] for r in results), "events": sum(r["events"] for r in results),
    }  # fmt: skip
    print(json.dumps(summary))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(summary, file, indent=1)
    return int(bool(failed))


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of texts have one order then: a seed is one story
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulator", *sys.argv[1:]])
    sys.exit(main())
