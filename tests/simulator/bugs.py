"""Bugs that this repository has had, put back one at a time: the schedules must find each."""

from __future__ import annotations

import gc
from typing import Any

from tests.mutations.mutation import Mutation

TEST = ("tests/simulator/test_simulator.py::test_a_bug_that_is_put_back_is_found_and_shrunk",)
LIMIT = 2000
"""Number of schedules within which a bug must be found."""


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
        "slime.ray.train_loop:TrainJob.save",
        "self.trainers.save(rollout_id, position, force_sync=is_last)",
        'self.trainers.save(rollout_id, lambda: self.step("save", position, needs_trainer=False), force_sync=is_last)',
    ),
    "a trainer that was started again is not connected to the engines": _bug(
        "slime.ray.push:WeightPush.send", "engines.num_new or not self.is_connected", "engines.num_new"
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
    "files are written in place": _bug("slime.utils.files:replace_file", 'path.with_name(path.name + ".tmp")', "path"),
    "a router that hangs is not found": _bug(
        "slime.backends.sglang_utils.router_process:RouterHandle.problem",
        "if timeout_s is not None and",
        "if False and",
    ),
    "a new engine that dies over its weights ends the run": _bug(
        "slime.ray.push:WeightPush.serve_new_engines",
        "if self._failed_resends >= MAX_FAILED_RESENDS:",
        "if True:",
    ),
    "a push that no engine took is not repeated": _bug(
        "slime.ray.push:WeightPush._push_until_taken", "num_failed == MAX_PUSHES", "True"
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
        "slime.ray.push:WeightPush._push_until_taken", "num_failed == MAX_PUSHES", "num_failed == 2"
    ),
    "a router that does not take a new engine in ends the run": _bug(
        "slime.ray.push:WeightPush._report_taken", "not self.restarts_engines", "True"
    ),
    "a checkpoint that counts is written again": _bug(
        "slime.ray.trainers:Trainers.save",
        "if self.actor.checkpoints.last == rollout_id:",
        "if False:",
    ),
    "SIGTERM to a rank ends a run that can go on": _bug(
        "slime.ext.recovery.preemption:Preemption.reached", "if self.lets_go(name):", "if False:"
    ),
    "the driver's deadline for the engines' memory is that of one engine": _bug(
        "slime.ray.engines.deadlines:memory_timeout_s",
        "restart_timeout_s(engine_start_timeout_s) + weight_update_timeout_s + MEMORY_MARGIN_S",
        "weight_update_timeout_s",
    ),
}


def find(bug: str, seeds: range) -> dict[str, Any] | None:
    """Put a bug back and look for it, seed by seed; return the first failing schedule, shrunk, or None."""
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
