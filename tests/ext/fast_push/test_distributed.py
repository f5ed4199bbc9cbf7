"""Which engine is at fault when a group breaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from slime.ext.fast_push import distributed
from slime.ext.fast_push.distributed import WeightGroup
from slime.ext.fast_push.loaders import RECEIVER
from slime.utils.errors import EngineError, WeightSyncError
from slime.weights.push.participants import Participants, PushClock
from tests.unit.backends.megatron_utils.update_weight.test_engine_group import Answer


@dataclass
class Engine:
    index: int
    leaves: Answer = field(default_factory=Answer)
    joins: Answer = field(default_factory=Answer)
    num_gpus: int = 1
    loaders: tuple[str, ...] = (RECEIVER,)

    def run(self, function: Callable[..., Any], /, *arguments: Any) -> Answer:
        return getattr(self, function.__name__)(*arguments)

    def join_weight_group(self, *place: Any) -> Answer:
        return self.joins

    def leave_weight_group(self, name: str) -> Answer:
        return self.leaves


CLOCK = PushClock(60)
COLLATERAL = WeightSyncError("the weight group was abandoned while rank 1 waited in it")


@pytest.mark.parametrize(
    ("failures", "stays", "blamed", "why"),
    [
        ({1: EngineError("it died")}, 1, {1}, "the one that does not leave either is dead"),
        ({0: COLLATERAL, 1: EngineError("out of memory")}, None, {1}, "an error of its own, not one of the group"),
        ({0: COLLATERAL, 1: COLLATERAL}, None, {0}, "when all errors are of the group, the first one's"),
        ({0: COLLATERAL, 1: COLLATERAL}, 1, {1}, "unless another hangs"),
        ({}, None, set(), "only the trainer's own part failed: nobody"),
    ],
)
def test_who_broke_a_group_is_found_when_all_leave_it(
    failures: dict[int, BaseException], stays: int | None, blamed: set[int], why: str
) -> None:
    group = WeightGroup("slime")
    group.members = [Engine(i, leaves=Answer(EngineError("dead")) if i == stays else Answer()) for i in range(3)]
    participants = Participants(group.members, CLOCK)
    group._blame(failures, participants, "broadcasting bucket 3")
    assert set(participants.reasons) == blamed, why
    assert all("while broadcasting bucket 3" in reason for reason in participants.reasons.values())


def test_an_excluded_engine_is_not_asked_to_leave_when_the_others_form_a_group_without_it(monkeypatch) -> None:
    """An engine that hung at the pause once took half of the remaining time a second time."""
    left, asked = threading.Event(), []

    class Channel:
        leave = left.set

    monkeypatch.setattr(Engine, "leave_weight_group", lambda self, name: asked.append(self.index) or self.leaves)
    group, engines = WeightGroup("slime"), [Engine(0), Engine(1)]
    group.members, group._channel = engines, Channel()
    participants = Participants(engines, CLOCK)
    participants.exclude(1, "no answer (while pausing)")
    group.form([], participants)
    assert left.is_set() and asked == [0]


def test_an_engine_that_cannot_join_ends_the_push_though_the_trainer_still_joins(monkeypatch) -> None:
    """NCCL's handshake cannot be interrupted: rank 0 once stayed in it until the push's deadline."""
    may_join, left = threading.Event(), threading.Event()

    class Channel:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            assert may_join.wait(30)

        def leave(self) -> None:
            left.set()

    monkeypatch.setattr(distributed, "WeightChannel", Channel)
    group, engines = WeightGroup("slime"), [Engine(0, joins=Answer(EngineError("no GPU peer access")))]
    participants = Participants(engines, CLOCK)
    started_s = time.monotonic()
    group.form(engines, participants)
    assert time.monotonic() - started_s < 10
    assert participants.reasons == {0: "EngineError: no GPU peer access (while joining the weight group)"}
    assert not group.is_whole
    assert not left.is_set()
    may_join.set()
    assert left.wait(10), "the group that came late is kept"


def test_a_group_that_the_trainer_joins_too_late_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, left = threading.Event(), threading.Event()

    class Late:
        def __init__(self, *_: Any, **__: Any) -> None:
            gate.wait(30)

        def leave(self) -> None:
            left.set()

    monkeypatch.setattr(distributed, "WeightChannel", Late)
    engines = [Engine(0)]
    with pytest.raises(WeightSyncError, match="though all 1 engines did: it took more than"):
        WeightGroup("slime").form(engines, Participants(engines, PushClock(0.2)))
    assert not left.is_set()
    gate.set()
    assert left.wait(30)
