"""SGLang's process group of a trainer rank and engines: the trainer never waits forever, whoever breaks the group."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed.distributed_c10d as c10d

from slime.backends.megatron_utils.update_weight import engine_group
from slime.backends.megatron_utils.update_weight.engine_group import EngineGroup
from slime.utils import env
from slime.utils.distributed_utils import NCCL_ERROR_HANDLING
from slime.utils.errors import EngineError
from slime.weights.push.participants import Participants, PushClock
from tests.eventually import wait_until
from tests.unit.weights.push.test_participants import Answer


@dataclass
class Engine:
    index: int
    answer: Answer = field(default_factory=Answer)
    joins: Answer = field(default_factory=Answer)
    num_gpus: int = 1

    def init_weights_update_group(self, *place: Any) -> Answer:
        return self.joins

    def update_weights_from_distributed(self, **bucket: Any) -> Answer:
        return self.answer


CLOCK = PushClock(60)


def test_the_trainer_leaves_sglangs_group_too_when_an_engine_did_not_join_it(monkeypatch) -> None:
    may_join, left = threading.Event(), threading.Event()

    def join_update_group(**place: Any) -> str:
        assert may_join.wait(30)
        return "the group"

    monkeypatch.setattr(engine_group.sglang, "join_update_group", join_update_group)
    monkeypatch.setattr(engine_group.dist, "destroy_process_group", lambda group: group == "the group" and left.set())
    group, engines = EngineGroup("slime"), [Engine(0), Engine(1, joins=Answer(EngineError("port in use")))]
    participants = Participants(engines, CLOCK)
    group.form(engines, participants)
    assert participants.reasons == {1: "EngineError: port in use (while joining update group slime)"}
    may_join.set()
    assert left.wait(10), "the group that came late is kept"


class WireOfTorch:
    """A group as SGLang creates it; torch knows it by name."""

    def __init__(self) -> None:
        self.groups: list[Any] = []
        self.settings: list[str | None] = []

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


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> WireOfTorch:
    made = WireOfTorch()
    monkeypatch.setattr(engine_group.sglang, "join_update_group", made.join_update_group)
    monkeypatch.setattr(engine_group.sglang, "flatten", made.flatten)
    return made


def test_a_group_of_sglangs_that_an_engine_broke_is_ended_and_a_restarted_engine_joins_the_next(
    wire: WireOfTorch,
) -> None:
    group = EngineGroup("slime")
    for answer in (Answer(EngineError("it died")), Answer()):
        engines = [Engine(0, answer, num_gpus=0)]  # the trainer is the group's only member
        participants = Participants(engines, CLOCK)
        group.form(engines, participants)
        assert not participants.reasons
        group.broadcast([("x", torch.zeros(2))], "1", participants)
    assert not participants.reasons and len(wire.groups) == 2
    wait_until(lambda: wire.groups[0] not in c10d._world.pg_map, "torch, and its watchdog with NCCL, forget the group")
    assert wire.groups[1] in c10d._world.pg_map
    c10d.destroy_process_group(wire.groups[1])


def test_a_first_broadcast_in_which_nccl_waits_for_a_dead_engine_does_not_hold_the_trainer(
    monkeypatch: pytest.MonkeyPatch, wire: WireOfTorch
) -> None:
    may_return, has_returned = threading.Event(), threading.Event()

    def broadcast(*_: Any, **__: Any) -> None:
        may_return.wait(10)
        has_returned.set()

    monkeypatch.setattr(engine_group.dist, "broadcast", broadcast)
    group, engines = EngineGroup("slime"), [Engine(0, Answer(EngineError("it died")), num_gpus=0)]
    participants = Participants(engines, CLOCK)
    group.form(engines, participants)
    group.broadcast([("x", torch.zeros(2))], "1", participants)
    assert participants.reasons == {0: "EngineError: it died (while broadcasting a bucket)"}
    assert not group.members and not has_returned.is_set()
    may_return.set()


def test_torch_does_not_end_the_trainer_for_a_broadcast_that_an_engine_of_sglangs_group_broke(
    wire: WireOfTorch,
) -> None:
    before = env.get_str(NCCL_ERROR_HANDLING)
    group, engines = EngineGroup("slime"), [Engine(0, num_gpus=0)]
    group.form(engines, Participants(engines, CLOCK))
    assert (wire.settings, env.get_str(NCCL_ERROR_HANDLING)) == (["0"], before)
    c10d.destroy_process_group(wire.groups[0])


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def join_update_group(**place: Any) -> str:
        raise RuntimeError("no NIC is up")

    monkeypatch.setattr(engine_group.sglang, "join_update_group", join_update_group)


def test_it_is_told_too_where_an_engine_waited_for_the_trainer_in_vain(
    caplog: pytest.LogCaptureFixture, no_network: None
) -> None:
    engines = [Engine(0, joins=Answer(delay_s=60))]
    participants = Participants(engines, PushClock(0.4))
    EngineGroup("slime").form(engines, participants)
    assert participants.reasons[0].startswith("EngineError: no answer within")
    assert "The trainer's part in a weight group failed: RuntimeError: no NIC is up" in caplog.text
