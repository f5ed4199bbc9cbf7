"""A rollout manager that dies while it generates, without Ray: its replacement's requests, in order."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
from ray.exceptions import OwnerDiedError

from slime.ext.recovery import job as recovering_job
from slime.ext.recovery.job import RecoveringJob
from slime.ray import waiting
from slime.ray.gpus import GpuSlice
from slime.ray.parts import Part, Parts
from slime.utils.errors import EngineDiedError

DIED = EngineDiedError("the rollout manager died")


class Manager:
    """A reference is the name of the request; the first manager's answers never come."""

    def __init__(self, name: str) -> None:
        self.generate = Namespace(remote=lambda rollout_id: f"{name} generates {rollout_id}")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = RecoveringJob.__new__(RecoveringJob)
    made.asked = []
    made.args = Namespace(trainer_recovery="checkpoint", train_timeout_s=60)
    made.parts = Parts(observers=(Part("slime.rollout.run_state:GroupObserver"),))
    made._background = None
    made.manager, made.actor, made.gpus = Manager("first"), None, {"rollout": GpuSlice(None, [], [])}
    made.trainers = Namespace(names=["actor rank 0"])
    made._recovery = Namespace(
        count=lambda death, error: made.asked.append("counted"),
        keep_instead=lambda trained: made.asked.append(trained),
        restart_if_down=lambda: made.asked.append("the trainer is up"),
    )
    made.push_weights = lambda: made.asked.append("pushed")

    def wait(step: str, ref: str, **_: Any) -> str:
        if ref.startswith("first"):
            raise DIED
        return ref

    made._wait_for_engines = wait
    monkeypatch.setattr(recovering_job, "find_death", lambda names, timeout_s: DIED if made.manager else None)
    monkeypatch.setattr(recovering_job, "create_manager_again", lambda *_: (Manager("second"), 2))
    monkeypatch.setattr(recovering_job, "wait_for", lambda ref, *, what, timeout_s: f"{ref} from {what}")
    return made


def test_the_rollout_is_begun_again_behind_those_that_the_ledger_gives_back(job):
    generation = job.start_generate(4)
    assert job.finish_generate(generation) == "second generates 4"
    trained = [(rollout_id, f"second generates {rollout_id} from the ledger") for rollout_id in (2, 3)]
    assert job.asked == ["counted", trained, "the trainer is up", "pushed"]
    assert job.finish_generate(generation) == "second generates 4", "a loop may wait twice for what it began"
    assert len(job.asked) == 4


def _die(deaths: list[Any]) -> None:
    if deaths:
        raise deaths.pop()


def test_a_rank_that_dies_meanwhile_is_noticed_when_its_train_data_is_there_again(job, monkeypatch):
    monkeypatch.setattr(waiting, "_sentinels", {"of the rank": "actor rank 0", "of the manager": "rollout manager"})
    watched = []

    def create(*_: Any) -> tuple[Manager, int]:
        watched.append(list(waiting._sentinels.values()))
        return Manager("second"), 2

    monkeypatch.setattr(recovering_job, "create_manager_again", create)
    job._recovery.restart_if_down = lambda: watched.append(sorted(waiting._sentinels.values()))
    assert job.finish_generate(job.start_generate(2)) == "second generates 2"
    assert watched == [["rollout manager"], ["actor rank 0", "rollout manager"]]


def test_train_data_that_is_lost_with_the_manager_while_the_trainer_starts_again_ends_nothing(job, monkeypatch):
    """The manager owned the data: a rank reports the lost object, and Ray knows of the death behind it."""
    lost = [OwnerDiedError("object", "owner", "here")]
    waits = job._wait_for_engines
    monkeypatch.setattr(job, "_wait_for_engines", lambda *args, **kw: _die(lost) or waits(*args, **kw))
    assert job.finish_generate(job.start_generate(2)) == "second generates 2"
    assert job.asked[0] == "counted" and not lost


@pytest.mark.parametrize(("recovery", "parts"), [("off", None), ("checkpoint", Parts())])
def test_without_recovery_or_a_record_of_the_groups_the_run_ends(job, recovery, parts):
    job.args.trainer_recovery, job.parts = recovery, parts or job.parts
    with pytest.raises(EngineDiedError, match="the rollout manager died"):
        job.finish_generate(job.start_generate(4))
    assert job.asked == []
