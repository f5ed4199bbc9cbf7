"""Who is still in a push, and whose failure it was."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed.distributed_c10d as c10d

from slime.utils import env
from slime.utils.errors import EngineError, WeightSyncError
from slime.weights.channel import NCCL_ERROR_HANDLING
from slime.weights.push import groups
from slime.weights.push.groups import StockGroup, UpdateGroup
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
    leaves: Answer = field(default_factory=Answer)
    joins: Answer = field(default_factory=Answer)
    num_gpus: int = 1

    def join_weight_group(self, *place: Any) -> Answer:
        return self.joins

    def init_weights_update_group(self, *place: Any) -> Answer:
        return self.joins

    def update_weights_from_distributed(self, **bucket: Any) -> Answer:
        return self.answer

    def ping(self) -> Answer:
        return self.answer

    def leave_weight_group(self, name: str) -> Answer:
        return self.leaves


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
    group = UpdateGroup("slime")
    group.members = [Engine(i, leaves=Answer(EngineError("dead")) if i == stays else Answer()) for i in range(3)]
    participants = Participants(group.members, CLOCK)
    group._blame(failures, participants, "broadcasting bucket 3")
    assert set(participants.reasons) == blamed, why
    assert all("while broadcasting bucket 3" in reason for reason in participants.reasons.values())


def test_an_excluded_engine_is_not_asked_to_leave_when_the_others_form_a_group_without_it(monkeypatch) -> None:
    """The answer of one that hung at the pause once took half of the time that was left, a second time."""
    left, asked = threading.Event(), []

    class Channel:
        leave = left.set

    monkeypatch.setattr(Engine, "leave_weight_group", lambda self, name: asked.append(self.index) or self.leaves)
    group, engines = UpdateGroup("slime"), [Engine(0), Engine(1)]
    group.members, group._channel = engines, Channel()
    participants = Participants(engines, CLOCK)
    participants.exclude(1, "no answer (while pausing)")
    group.form([], participants)
    assert left.is_set() and asked == [0]


def test_an_engine_that_cannot_join_ends_the_push_though_the_trainer_still_joins(monkeypatch) -> None:
    """NCCL's hand-shake cannot be ended from outside: rank 0 once stayed in it until the deadline of the push."""
    may_join, left = threading.Event(), threading.Event()

    class Channel:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            assert may_join.wait(30)

        def leave(self) -> None:
            left.set()

    monkeypatch.setattr(groups, "WeightChannel", Channel)
    group, engines = UpdateGroup("slime"), [Engine(0, joins=Answer(EngineError("no GPU peer access")))]
    participants = Participants(engines, CLOCK)
    started_s = time.monotonic()
    group.form(engines, participants)
    assert time.monotonic() - started_s < 10
    assert participants.reasons == {0: "EngineError: no GPU peer access (while joining the weight group)"}
    assert not group.is_whole
    assert not left.is_set()
    may_join.set()
    assert left.wait(10), "the group that came late is kept"


def test_the_trainer_leaves_sglangs_group_too_when_an_engine_did_not_join_it(monkeypatch) -> None:
    may_join, left = threading.Event(), threading.Event()

    class Wire:
        def prepare(self) -> None: ...

        def join_update_group(self, **place: Any) -> str:
            assert may_join.wait(30)
            return "the group"

    monkeypatch.setattr(groups.dist, "destroy_process_group", lambda group: group == "the group" and left.set())
    group, engines = StockGroup("slime", Wire()), [Engine(0), Engine(1, joins=Answer(EngineError("port in use")))]
    participants = Participants(engines, CLOCK)
    group.form(engines, participants)
    assert participants.reasons == {
        0: "engine 1 broke the update group (while joining update group slime)",
        1: "EngineError: port in use (while joining update group slime)",
    }
    may_join.set()
    assert left.wait(10), "the group that came late is kept"


class WireOfTorch:
    """A group as SGLang makes it: torch knows it by its name."""

    def __init__(self) -> None:
        self.groups: list[Any] = []
        self.settings: list[str | None] = []

    def prepare(self) -> None: ...

    def flatten(self, bucket: Any) -> torch.Tensor:
        return torch.cat([tensor for _, tensor in bucket])

    def join_update_group(self, *, world_size: int, group_name: str, timeout_s: float, **place: Any) -> Any:
        self.settings.append(env.get_str(NCCL_ERROR_HANDLING))
        group, _ = c10d._new_process_group_helper(
            world_size, 0, [], c10d.Backend("gloo"), torch.distributed.HashStore(), group_name=group_name,
            timeout=timedelta(seconds=timeout_s),
        )  # fmt: skip
        c10d._world.pg_group_ranks[group] = {0: 0}
        self.groups.append(group)
        return group


def test_a_group_of_sglangs_that_an_engine_broke_is_ended_and_a_restarted_engine_joins_the_next() -> None:
    wire = WireOfTorch()
    group = StockGroup("slime", wire)
    for answer in (Answer(EngineError("it died")), Answer()):
        engines = [Engine(0, answer, num_gpus=0)]  # the trainer is alone in the group
        participants = Participants(engines, CLOCK)
        group.form(engines, participants)
        assert not participants.reasons
        group.broadcast([("x", torch.zeros(2))], "1", participants)
    assert not participants.reasons and len(wire.groups) == 2
    deadline_s = time.monotonic() + 30
    while wire.groups[0] in c10d._world.pg_map:
        assert time.monotonic() < deadline_s, "torch, and its watchdog with NCCL, still has the broken group"
        time.sleep(0.01)
    assert wire.groups[1] in c10d._world.pg_map
    c10d.destroy_process_group(wire.groups[1])


def test_a_first_broadcast_in_which_nccl_waits_for_a_dead_engine_does_not_hold_the_trainer(monkeypatch) -> None:
    may_return, has_returned, wire = threading.Event(), threading.Event(), WireOfTorch()

    def broadcast(*_: Any, **__: Any) -> None:
        may_return.wait(10)
        has_returned.set()

    monkeypatch.setattr(groups.dist, "broadcast", broadcast)
    group, engines = StockGroup("slime", wire), [Engine(0, Answer(EngineError("it died")), num_gpus=0)]
    participants = Participants(engines, CLOCK)
    group.form(engines, participants)
    group.broadcast([("x", torch.zeros(2))], "1", participants)
    assert participants.reasons == {0: "EngineError: it died (while broadcasting a bucket)"}
    assert not group.members and not has_returned.is_set()
    may_return.set()


def test_torch_does_not_end_the_trainer_for_a_broadcast_that_an_engine_of_sglangs_group_broke() -> None:
    wire, before = WireOfTorch(), env.get_str(NCCL_ERROR_HANDLING)
    group, engines = StockGroup("slime", wire), [Engine(0, num_gpus=0)]
    group.form(engines, Participants(engines, CLOCK))
    assert (wire.settings, env.get_str(NCCL_ERROR_HANDLING)) == (["0"], before)
    c10d.destroy_process_group(wire.groups[0])


class WireWithoutNetwork:
    def prepare(self) -> None: ...

    def join_update_group(self, **place: Any) -> str:
        raise RuntimeError("no NIC is up")


def test_what_kept_the_trainer_from_sglangs_group_is_told() -> None:
    engines = [Engine(0)]
    participants = Participants(engines, CLOCK)
    StockGroup("slime", WireWithoutNetwork()).form(engines, participants)
    assert participants.reasons == {
        0: "the trainer's part failed: RuntimeError: no NIC is up (while joining update group slime)"
    }


def test_it_is_told_too_where_an_engine_waited_for_the_trainer_in_vain(caplog) -> None:
    engines = [Engine(0, joins=Answer(delay_s=60))]
    participants = Participants(engines, PushClock(0.4))
    StockGroup("slime", WireWithoutNetwork()).form(engines, participants)
    assert participants.reasons[0].startswith("EngineError: no answer within")
    assert "the trainer's part in a weight group failed: RuntimeError: no NIC is up" in caplog.text


def test_a_group_that_the_trainer_joins_too_late_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, left = threading.Event(), threading.Event()

    class Late:
        def __init__(self, *_: Any, **__: Any) -> None:
            gate.wait(30)

        def leave(self) -> None:
            left.set()

    monkeypatch.setattr(groups, "WeightChannel", Late)
    engines = [Engine(0)]
    with pytest.raises(WeightSyncError, match="though all 1 engines did: it took more than"):
        UpdateGroup("slime").form(engines, Participants(engines, PushClock(0.2)))
    assert not left.is_set()
    gate.set()
    assert left.wait(30)
