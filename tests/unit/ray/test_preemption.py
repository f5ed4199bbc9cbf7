"""SIGTERM to a driver: what ends first, what is saved, and when it leaves with nothing saved."""

from __future__ import annotations

import signal

import pytest

from slime.ray.preemption import Interrupted, Notice
from slime.utils.errors import CheckpointError


@pytest.fixture
def notice():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    made = Notice()
    made.listen()
    yield made
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


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
    notice.leave()
    assert done == ["trained", "saved"]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_without_a_grace_the_job_leaves_at_once_and_saves_nothing(notice):
    done = []
    notice.save = lambda: done.append("saved")
    with pytest.raises(Interrupted), notice.deferred():
        signal.raise_signal(signal.SIGTERM)
        notice.check()
        done.append("trained")
    notice.leave()
    assert done == []


def test_a_step_or_a_save_that_takes_longer_than_the_grace_is_left(notice, caplog):
    def wait_for_the_alarm() -> None:
        signal.pause()
        notice.check()

    notice.grace_s, notice.save = 0.05, wait_for_the_alarm
    with pytest.raises(Interrupted), notice.deferred():
        signal.raise_signal(signal.SIGTERM)
        notice.check()
        wait_for_the_alarm()
        pytest.fail("the alarm did not interrupt the step")
    notice._is_over = False
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    notice.leave()
    assert "--preemption-grace-s 0.05 was too short for the save" in caplog.text


@pytest.mark.parametrize("error", [CheckpointError("the disk is full"), RuntimeError("Connection closed by peer")])
def test_a_save_that_fails_is_an_error_in_the_log(notice, caplog, error):
    def fail() -> None:
        raise error

    notice.grace_s, notice.save = 1000.0, fail
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Interrupted):
        notice.check()
    notice.leave()
    assert f"The save after SIGTERM failed, and the one before it counts: {error}" in caplog.text
