"""Bugs that this repository has had, to be put back one at a time: the schedules must find each."""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

from slime.utils.atomic_file import replace_file
from tests.mutations.mutation import Mutation

TEST = ("tests/simulator/test_simulator.py::test_a_bug_that_is_put_back_is_found_and_shrunk",)
LIMIT = 2000
"""Schedules within which a bug must be found."""
CHUNK = 20
"""Seeds that a worker tries of one bug, before it looks for the next."""


def _bug(target: str, old: str, new: str) -> tuple[Mutation, ...]:
    return (Mutation(bug=target, target=target, old=old, new=new, tests=TEST),)


BUGS: dict[str, tuple[Mutation, ...]] = {
    "a new engine gets requests before it has the weights": _bug(
        "slime.ray.engines.group:EngineGroup._restart", "register = not self.takes_updates", "register = True"
    ),
    "the position is saved as of now, while the next rollout is under way": _bug(
        "slime.rollout.run_state:CheckpointPosition.save",
        "self._before.get(rollout_id + 1, (None, [None] * len(self._observers)))",
        "(None, [None] * len(self._observers))",
    ),
    "a trainer that dies while the position is saved does not write again": _bug(
        "slime.ray.train_loop:TrainJob.save_position",
        'wait_for(position, what="the position in the data to be saved", timeout_s=self.args.train_timeout_s)',
        'self.step("save", lambda: wait_for(position, what="", timeout_s=300.0), needs_trainer=False)',
    ),
    "a trainer that was started again is not connected to the engines": _bug(
        "slime.ray.actor_group:RayTrainGroup._push", "engines.num_new or not self._is_connected", "engines.num_new"
    ),
    "a trainer that was started again does not repeat the steps since its checkpoint": _bug(
        "slime.ext.recovery.trainer_recovery:TrainerRecovery.restart", "self._train(rollout_id, rollout_data)", "pass"
    ),
    "the ledger is retired before an asynchronous checkpoint counts": _bug(
        "slime.ext.ledger.ledger:Ledger.published",
        "(k for k in self._saved if k <= _tracked_rollout(self._args.save))",
        "self._saved",
    ),
    "an asynchronous checkpoint counts before it is on disk": _bug(
        "slime.backends.megatron_utils.checkpoints.checkpoint_writer:BackgroundSave._publish_if_due",
        "if not self._is_written or self._wanted is None:",
        "if self._wanted is None:",
    ),
    "files are written in place": _bug(
        "slime.utils.atomic_file:replace_file", 'path.with_name(path.name + ".tmp")', "path"
    ),
    "a router that hangs is not found": _bug(
        "slime.backends.sglang_utils.router_process:RouterHandle.problem",
        "if timeout_s is not None and",
        "if False and",
    ),
    "a new engine that dies over its weights ends the run": _bug(
        "slime.ray.actor_group:RayTrainGroup.serve_new_engines",
        "if self._failed_resends >= MAX_FAILED_RESENDS:",
        "if True:",
    ),
    "a push that no engine took is not repeated": _bug(
        "slime.ray.actor_group:RayTrainGroup._push_until_taken", "num_failed == MAX_PUSHES", "True"
    ),
    "a probe reaches an engine behind the order to give its memory away": _bug(
        "slime.ray.engines.monitor:HealthMonitor._probe_all", " and self._is_valid(pauses)", ""
    ),
    "an engine that could not be paused serves the next rollout": _bug(
        "slime.ray.engines.group:EngineGroup.begin_rollout",
        "if state is EngineState.EVICTED:",
        "if False:",
    ),
    "nonsense in the place of a version ends the run": _bug(
        "slime.backends.sglang_utils.weight_verbs:WeightVerbs.get_weight_version",
        'if info is not None and not (isinstance(info, dict) and "weight_version" in info):',
        "if False:",
    ),
    "versions of an earlier life come again for other weights": _bug(
        "slime.flags.checkpoint:version_before",
        "max(version, last - (rollout_id == start_rollout_id - 1))",
        "version",
    ),
    "a push that no engine took is repeated once": _bug(
        "slime.ray.actor_group:RayTrainGroup._push_until_taken", "num_failed == MAX_PUSHES", "num_failed == 2"
    ),
    "a router that does not take a new engine in ends the run": _bug(
        "slime.ray.actor_group:RayTrainGroup._report_taken", "not self.restarts_engines", "True"
    ),
    "a checkpoint that counts is written again": _bug(
        "slime.ext.recovery.job:RecoveringJob.write_checkpoints",
        "if self.actor.last_checkpoint != rollout_id:",
        "if True:",
    ),
    "SIGTERM to a rank ends a run that can go on": _bug(
        "slime.ext.recovery.preemption:Preemption.reached", "if self.lets_go(name):", "if False:"
    ),
    "the driver's deadline for the engines' memory is that of one engine": _bug(
        "slime.ray.engines.memory:memory_timeout_s",
        "restart_timeout_s(args) + args.weight_update_timeout_s + MARGIN_S",
        "args.weight_update_timeout_s",
    ),
}


def find(bug: str, seeds: range) -> dict[str, Any] | None:
    """Put a bug back and look for it, seed after seed; return the first that fails, shrunk, or None."""
    from tests.simulator.runner import COLLECT_EVERY, installed, run_schedule, schedule_of, shrink

    with installed():
        for seed in seeds:
            setup, faults = schedule_of(seed)
            if seed % COLLECT_EVERY == 0:
                gc.collect()
            with BUGS[bug][0].applied():
                is_suspect = bool(run_schedule(seed, setup, faults).violations)
            if not is_suspect or run_schedule(seed, setup, faults).violations:
                continue  # it also fails without the bug
            with BUGS[bug][0].applied():
                outcome = run_schedule(seed, setup, faults)
                if outcome.violations:
                    _, faults, outcome = shrink(seed)
            if outcome.violations:
                return {"seed": seed, "faults": [str(f) for f in faults], "violation": outcome.violations[0][:300]}
    return None


class Search:
    """Looks for several bugs on several cores, some seeds of each in turn; the file has what is known at any time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._began_s = options, time.monotonic()
        count = min(options.schedules, LIMIT)
        begins = range(options.seed, options.seed + count, CHUNK)
        bugs = [bug for bug in BUGS if options.bug in bug]
        ends = options.seed + count
        self._left = [(bug, range(begin, min(begin + CHUNK, ends))) for begin in begins for bug in bugs]
        self._rows: dict[str, dict[str, Any]] = {bug: {"bug": bug, "searched": 0, "schedules": None} for bug in bugs}

    def run(self) -> int:
        """Return 1 when a bug was not found."""
        ends_s = self._began_s + self._options.limit_s
        with ProcessPoolExecutor(self._options.workers, mp_context=multiprocessing.get_context("fork")) as pool:
            running: dict[Future[Any], tuple[str, range]] = {}
            while self._submit(pool, running):
                done, _ = wait(running, max(ends_s - time.monotonic(), 0.0), FIRST_COMPLETED)
                for future in done:
                    self._take(*running.pop(future), future.result())
                if not done:
                    print(f"cut off after {self._options.limit_s:g} s", flush=True)
                    for process in list(pool._processes.values()):
                        process.terminate()
                    break
        missing = [bug for bug, row in self._rows.items() if not row["schedules"]]
        for bug in missing:
            print(f"{bug}: NOT FOUND by {self._rows[bug]['searched']} schedules", flush=True)
        self._write()
        print(f"{len(self._rows) - len(missing)} of {len(self._rows)} bugs were found")
        return int(bool(missing))

    def _submit(self, pool: ProcessPoolExecutor, running: dict[Future[Any], tuple[str, range]]) -> bool:
        """Keep all workers busy; return whether any is."""
        while len(running) < self._options.workers and self._left:
            bug, seeds = self._left.pop(0)
            if not self._rows[bug]["schedules"]:
                running[pool.submit(find, bug, seeds)] = bug, seeds
        return bool(running)

    def _take(self, bug: str, seeds: range, found: dict[str, Any] | None) -> None:
        row = self._rows[bug]
        row["searched"] += len(seeds)
        if found is not None and not row["schedules"]:
            row |= {"schedules": found["seed"] - self._options.seed + 1} | found
            print(f"{bug}: found by seed {found['seed']}, schedule {row['schedules']}", flush=True)
            print(f"    {'; '.join(found['faults'])}\n    {found['violation']}", flush=True)
            self._write()

    def _write(self) -> None:
        if self._options.out:
            known = {
                "first_seed": self._options.seed, "seconds": round(time.monotonic() - self._began_s),
                "found": sum(bool(row["schedules"]) for row in self._rows.values()),
                "bugs": list(self._rows.values()),
            }  # fmt: skip
            content = (json.dumps(known, indent=1) + "\n").encode()
            replace_file(self._options.out, lambda file: file.write(content), to_disk=False)
