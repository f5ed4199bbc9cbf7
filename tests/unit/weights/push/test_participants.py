"""Which engines are still part of a push."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from slime.utils.errors import EngineError, WeightSyncError
from slime.weights.push.participants import Participants, PushClock, start_all, wait_together


@dataclass
class Answer:
    value: Any = None
    delay_s: float = 0.0

    def wait(self, timeout_s: float) -> Any:
        if self.delay_s > timeout_s:
            time.sleep(timeout_s)
            raise EngineError(f"no answer within {timeout_s:.2f} s")
        time.sleep(self.delay_s)
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


@dataclass
class Engine:
    index: int
    answer: Answer = field(default_factory=Answer)

    def ping(self) -> Answer:
        return self.answer


CLOCK = PushClock(60)


def test_an_engine_gets_half_of_the_time_that_is_left() -> None:
    assert PushClock(10).step_s == pytest.approx(5, abs=0.1)
    late = PushClock(10, started_s=time.monotonic() - 8)
    assert late.step_s == pytest.approx(1, abs=0.1)
    assert 0 < PushClock(1, started_s=time.monotonic() - 8).step_s < 0.1


def test_those_that_do_not_answer_are_excluded_with_the_reason_and_asked_no_more() -> None:
    engines = [Engine(0, Answer("fine")), Engine(1, Answer(EngineError("it died"))), Engine(2, Answer("late", 5))]
    participants = Participants(engines, PushClock(1))
    answers = participants.ask("pausing", lambda engine: engine.ping())
    assert answers == {0: "fine"}
    assert [engine.index for engine in participants.excluded] == [1, 2]
    assert participants.excluded[0].reason == "EngineError: it died (while pausing)"
    assert "no answer" in participants.excluded[1].reason
    assert participants.good == engines[:1]
    assert participants.ask("flushing", lambda engine: engine.ping()) == {0: "fine"}


def test_the_first_reason_counts_and_ranks_share_what_they_met() -> None:
    participants = Participants([Engine(0), Engine(1)], CLOCK)
    participants.exclude(1, "first")
    participants.exclude(1, "second")
    participants.merge([{1: "other"}, {0: "seen elsewhere"}])
    assert {engine.index: engine.reason for engine in participants.excluded} == {0: "seen elsewhere", 1: "first"}


def test_a_request_that_cannot_even_be_sent_fails_when_it_is_waited_for() -> None:
    def call(engine: Engine) -> Answer:
        raise OSError("no connection")

    with pytest.raises(OSError, match="no connection"):
        start_all([Engine(0)], call)[0].wait(1)


def test_the_first_failure_frees_those_that_wait_for_it() -> None:
    freed = threading.Event()

    class Held:
        def wait(self, timeout_s: float) -> None:
            assert freed.wait(timeout_s)
            raise WeightSyncError("the weight group was abandoned")

    dead = EngineError("it died")
    failures = wait_together({0: Held(), 1: Answer(dead), 2: Answer("fine")}, 30, freed.set)
    assert list(failures) == [1, 0], "in the order in which they came"
    assert failures[1] is dead
