"""SIGTERM to a driver: what ends first, what is saved, and when it exits without saving."""

from __future__ import annotations

import signal
from argparse import Namespace
from contextlib import nullcontext

import pytest
from ray.exceptions import RayActorError

from slime.ext.recovery import job as recovering_job
from slime.ext.recovery.job import RecoveringJob
from slime.ext.recovery.preemption import Preemption
from slime.ray import startup, waiting
from slime.ray.trainers import Trainers
from slime.ray.waiting import Interrupted, Sigterm, react_by


@pytest.fixture
def notice():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    made = Preemption()
    made.listen()
    yield made
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)
    react_by(Sigterm())


def test_a_step_of_the_trainer_ends_and_is_saved_before_the_job_leaves(notice):
    done = []
    notice.grace_s, notice.save = 1000.0, lambda: done.append("saved")
    with pytest.raises(Interrupted):
        with notice.deferred():
            with notice.deferred():
                signal.raise_signal(signal.SIGTERM)
                notice.check()
            done.append("trained")
        done.append("generated")
    assert done == ["trained", "saved"]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_without_a_grace_the_job_leaves_at_once_and_saves_nothing(notice):
    done = []
    notice.save = lambda: done.append("saved")
    with pytest.raises(Interrupted), notice.deferred():
        signal.raise_signal(signal.SIGTERM)
        notice.check()
        done.append("trained")
    assert done == []


@pytest.mark.parametrize("is_the_step", [True, False])
def test_a_step_or_a_save_that_takes_longer_than_the_grace_is_left(notice, caplog, is_the_step):
    def wait_for_the_alarm() -> None:
        signal.pause()
        notice.check()

    notice.grace_s, notice.save = 0.05, wait_for_the_alarm
    with pytest.raises(Interrupted), notice.deferred() if is_the_step else nullcontext():
        signal.raise_signal(signal.SIGTERM)
        notice.check()
        wait_for_the_alarm()
        pytest.fail("the alarm did not interrupt the step")
    assert "--preemption-grace-s 0.05 was too short for the save" in caplog.text


def test_sigterm_that_a_process_of_the_job_got_too_is_not_taken_for_its_death(notice, monkeypatch):
    class Ref:
        """The reference of a call."""

    rollout, sentinel = Ref(), Ref()

    def wait(refs: list[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        signal.raise_signal(signal.SIGTERM)
        return [sentinel], [rollout]

    def get(ref: Ref, timeout: float) -> None:
        raise RayActorError

    monkeypatch.setattr(waiting, "ray", Namespace(ObjectRef=Ref, wait=wait, get=get))
    react_by(notice)
    monkeypatch.setitem(waiting._sentinels, sentinel, "the rollout manager")
    with pytest.raises(Interrupted):
        waiting.wait_for(rollout, what="the rollout", timeout_s=10)


class Trainer:
    """Records its calls."""

    checkpoints = Namespace(last=None)

    def __init__(self, role: str, done: list[str]) -> None:
        self._role, self._done = role, done

    def write_checkpoint(self, rollout_id: int, force_sync: bool) -> None:
        assert force_sync, "the processes are to end"
        self._done.append(f"write {self._role} {rollout_id}")

    def publish_checkpoint(self, rollout_id: int) -> None:
        self._done.append(f"publish {self._role} {rollout_id}")


def leaving_job(monkeypatch, done: list[str], *, shares_gpus: bool, is_down: bool = False) -> RecoveringJob:
    made = RecoveringJob.__new__(RecoveringJob)
    made.args = Namespace(  # type: ignore[assignment]
        save="/save", offload_rollout=shares_gpus, rollout_global_dataset=True, train_timeout_s=1.0,
        num_rollout=9, preemption_grace_s=1.0,
    )  # fmt: skip
    made.actor = Trainer("actor", done)  # type: ignore[assignment]
    made.trainers = Trainers(made.actor, Trainer("critic", done))  # type: ignore[arg-type]
    made.manager = Namespace(save=Namespace(remote=lambda rollout_id: done.append(f"position {rollout_id}")))
    made._recovery, made._unsaved = Namespace(is_down=is_down), 3  # type: ignore[assignment]
    monkeypatch.setattr(startup, "wait_for", lambda ref, **_: None)
    monkeypatch.setattr(recovering_job, "cluster_has_accelerators", lambda: True)
    monkeypatch.setattr(recovering_job, "RELEASE_GRACE_S", 0.0)
    monkeypatch.setattr(recovering_job.ray, "kill", lambda actor: done.append("kill the manager"))
    return made


def test_a_job_that_leaves_saves_actor_and_critic_whoever_has_the_gpus(monkeypatch):
    models, done = ["write critic 3", "write actor 3"], []
    leaving_job(monkeypatch, done, shares_gpus=False)._save_and_leave()
    assert done == [*models, "position 3", "publish critic 3", "publish actor 3"]
    done.clear()
    leaving_job(monkeypatch, done, shares_gpus=True)._save_and_leave()
    assert done == ["position 3", "kill the manager", *models, "publish critic 3", "publish actor 3"]
