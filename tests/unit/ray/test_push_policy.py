"""What the driver does about engines that a push excluded; the fleet acts on what it reports."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from slime.ray.train_loop import TrainJob
from slime.utils.errors import WeightSyncError
from slime.weights.push.participants import ExcludedEngine

EXCLUDED = [ExcludedEngine(1, "it holds other bytes")]


class Actor:
    """The trainer: each push has the outcome that comes next."""

    def __init__(self, *outcomes: str) -> None:
        self.outcomes = list(outcomes)
        self.excluded: list[ExcludedEngine] = []
        self.pushes: list[str] = []

    def update_weights(self, kind: str = "update") -> None:
        self.pushes.append(kind)
        outcome = self.outcomes.pop(0) if self.outcomes else "fine"
        self.excluded = list(EXCLUDED) if outcome in ("excludes one", "excludes all") else []
        if outcome in ("excludes all", "trainer fails"):
            raise WeightSyncError(outcome)

    def resend_weights(self, engines: Any) -> None:
        self.update_weights("resend")


class Job(TrainJob):
    """The loop's step, with a manager that only notes what it is asked."""

    def __init__(self, actor: Actor, policy: str, *, tolerant: bool, waiting: int = 0) -> None:
        self.args = Namespace(
            weight_push_failure=policy, use_fault_tolerance=tolerant, debug_train_only=False, engine_start_timeout_s=1
        )
        self.actor, self._failed_resends, self.waiting = actor, 0, waiting
        self.asked: list[tuple[Any, ...]] = []

    def _ask(self, method: str, *arguments: Any, what: str, timeout_s: float | None = None) -> Any:
        self.asked.append((method, *arguments))
        if method == "get_engines_without_weights":
            return Namespace(handles=[None] * self.waiting)
        return 0


def asked(job: Job) -> list[str]:
    return [method for method, *_ in job.asked]


def test_a_push_that_all_engines_take_asks_for_nothing() -> None:
    job = Job(Actor("fine"), "refill", tolerant=True)
    job._push_to_engines()
    assert (job.asked, job.actor.pushes) == ([], ["update"])


def test_an_engine_that_did_not_take_the_push_is_reported_and_the_run_goes_on() -> None:
    job = Job(Actor("excludes one"), "drop", tolerant=False)
    job._push_to_engines()
    assert job.asked == [("push_refused", EXCLUDED)]
    assert job.actor.pushes == ["update"]


def test_refill_starts_another_and_gives_it_the_same_version_at_once_where_it_is_up() -> None:
    job = Job(Actor("excludes one"), "refill", tolerant=True, waiting=1)
    job._push_to_engines()
    assert asked(job) == ["push_refused", "recover_updatable_engines", "get_engines_without_weights"]
    assert job.actor.pushes == ["update", "resend"]


def test_when_no_engine_took_it_others_are_started_and_the_push_is_made_again() -> None:
    job = Job(Actor("excludes all"), "refill", tolerant=True)
    job._push_to_engines()
    assert asked(job) == ["push_refused", "find_dead_engines", "recover_updatable_engines"]
    assert job.actor.pushes == ["update", "update"]


def test_a_failure_of_the_trainers_own_stays_one() -> None:
    job = Job(Actor("trainer fails"), "refill", tolerant=True)
    with pytest.raises(WeightSyncError, match="trainer fails"):
        job._push_to_engines()
    assert job.actor.pushes == ["update"]


def test_without_fault_tolerance_a_push_that_nobody_takes_ends_the_run() -> None:
    job = Job(Actor("excludes all"), "drop", tolerant=False)
    with pytest.raises(WeightSyncError, match="excludes all"):
        job._push_to_engines()


def test_a_replacement_that_does_not_take_its_first_weights_either_is_replaced_again() -> None:
    job = Job(Actor("excludes all"), "refill", tolerant=True, waiting=1)
    job._serve_new_engines()
    assert ("push_refused", EXCLUDED) in job.asked
