"""Engines lend their memory to a restarting trainer, once no request needs it."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest

from slime.ext.recovery.lending import _may_lend, lend
from slime.ray.engines.fleet import EngineFleet
from slime.ray.engines.lifecycle import SERVES, EngineEvent, EngineState
from slime.ray.engines.memory import SharedMemory
from slime.ray.engines.models import RolloutServer
from tests.unit.ray.engines import test_memory
from tests.unit.ray.engines.test_lifecycle import STATE, at_once, make_group  # noqa: F401 - a fixture among them
from tests.unit.ray.engines.test_memory import (
    ABORT,
    FAILS,
    REFUSED,
    RELEASE,
    RESUME,
    WAITING,
    Group,
    shared,
)

calls, nothing_fails = test_memory.calls, test_memory.nothing_fails


def fleet_of(memory: SharedMemory, *, is_stuck: bool) -> Any:
    """A fleet whose trained model answers, or does not."""
    regular = Namespace(config=Namespace(worker_type="regular"), indices=lambda *states: [] if is_stuck else [0])
    idle = Namespace(pause_monitors=lambda: None, weights=Namespace(model=Namespace(groups=[regular])))
    return Namespace(**vars(idle), memory=memory)


def test_a_trainer_gets_no_gpu_while_an_engine_on_one_starts_or_serves_requests_that_are_answered(calls):
    group, judge = Group(calls, "a", "b"), Group(calls, "j", takes_updates=False)
    memory = shared(group, judge)
    group.states = [WAITING, EngineState.RETIRED]
    judge.states = [WAITING]
    assert _may_lend(fleet_of(memory, is_stuck=False))
    for state in set(EngineState) - {WAITING, EngineState.RETIRED}:
        for one in (group, judge):
            before, one.states[0] = one.states[0], state
            assert not _may_lend(fleet_of(memory, is_stuck=False))
            assert _may_lend(fleet_of(memory, is_stuck=True)) == (state in SERVES)
            one.states[0] = before


def test_engines_that_all_wait_for_weights_make_room_for_a_trainer_as_often_as_they_got_it_back(calls):
    group = Group(calls, "a", "b")
    memory = shared(group)
    group.replace(0)
    group.states[1] = EngineState.RETIRED
    for _ in range(2):
        lend(fleet_of(memory, is_stuck=True))
    memory.take_back(None)
    lend(fleet_of(memory, is_stuck=True))
    assert calls == [("a+", RELEASE), ("a+", RESUME, None), ("a+", RELEASE)]


def test_engines_that_serve_are_taken_from_their_router_first_and_another_models_answer_what_they_were_asked(calls):
    prefill, decode, judge = Group(calls, "p"), Group(calls, "d"), Group(calls, "j", takes_updates=False)
    decode.replace(0)
    memory = shared(prefill, decode, judge)
    lend(fleet_of(memory, is_stuck=True))
    assert calls[:3] == [("p", "delist"), ("j", "delist"), ("p", ABORT)]
    assert calls[3:] == [(name, RELEASE) for name in ("p", "d+", "j")]
    calls.clear()
    memory.take_back(["weights"])
    assert judge.states == [WAITING]
    memory.take_back(["kv_cache", "cuda_graph"])
    assert calls[-1] == ("j", EngineEvent.PUSH_DONE)
    assert (prefill.states, decode.states, judge.states) == ([WAITING], [WAITING], [EngineState.SERVING])


def test_one_that_cannot_abort_or_that_its_router_does_not_take_in_again_is_replaced(calls):
    prefill, judge = Group(calls, "p"), Group(calls, "j", takes_updates=False)
    FAILS.add(("p", ABORT))
    REFUSED.add("j")
    memory = shared(prefill, judge)
    lend(fleet_of(memory, is_stuck=True))
    assert [call for call in calls if call[1] == RELEASE] == [("j", RELEASE), ("p+", RELEASE)]
    memory.take_back(None)
    assert judge.states == [EngineState.RESTARTING]


@pytest.mark.parametrize("kinds", (("regular",), ("prefill", "decode")))
def test_engines_make_room_for_a_dead_trainer_once_no_request_is_answered_whoever_else_serves(kinds, monkeypatch):
    groups = [make_group(2) for _ in kinds]
    judge = make_group(1, takes_updates=False, name="judge")
    for group, kind in zip(groups, kinds, strict=True):
        group.config = replace(group.config, worker_type=kind)
    for group in (*groups, judge):
        group.needs_offload = True
    servers = [RolloutServer(groups[0].model, None, groups), RolloutServer(judge.model, None, [judge])]
    fleet = EngineFleet(groups[0].args, servers)
    lent: list[str] = []
    monkeypatch.setattr(fleet.memory, "release_others", lambda prepare: lent.append("lent"))
    monkeypatch.setattr(fleet, "pause_monitors", lambda: lent.append("unwatched"))
    groups[-1].states = [STATE.SERVING, STATE.UPDATING]
    assert not lend(fleet)
    groups[-1].states = [STATE.RESTARTING, STATE.UPDATING]
    assert not lend(fleet) and not lent
    groups[-1].states = [STATE.UPDATING, STATE.UPDATING]
    assert lend(fleet) and lent == ["unwatched", "lent"]
