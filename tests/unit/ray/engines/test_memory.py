"""Engines on the trainers' GPUs release their memory, and so does the replacement of an engine that fails."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from slime.ray.engines import memory
from slime.ray.engines.lifecycle import LIVE, EngineEvent, EngineState
from slime.ray.engines.memory import SharedMemory
from slime.utils.errors import DeadlineError, EngineError

RELEASE, RESUME, ABORT = "release_memory_occupation", "resume_memory_occupation", "abort_all"
WAITING = EngineState.UPDATING


class Group:
    """Engines by name; a failing one has been replaced when the group has settled."""

    needs_offload = True

    def __init__(self, calls: list[Any], *engines: str, takes_updates: bool = True) -> None:
        self._calls, self.takes_updates = calls, takes_updates
        self.engines = [self._engine(name) for name in engines]
        self.states = [EngineState.SERVING] * len(engines)

    def _engine(self, name: str) -> Namespace:
        def method(verb: str) -> Namespace:
            return Namespace(remote=lambda **keywords: (name, verb, *keywords.values()))

        return Namespace(name=name, **{verb: method(verb) for verb in (RELEASE, RESUME, ABORT)})

    def replace(self, index: int) -> None:
        self.engines[index] = self._engine(self.engines[index].name + "+")
        self.states[index] = EngineState.UPDATING

    def indices(self, *states: EngineState) -> list[int]:
        return [index for index, state in enumerate(self.states) if state in states]

    def name_of(self, index: int) -> str:
        return f"engine {index}"

    def report(self, index: int, event: EngineEvent, reason: str = "") -> None:
        if event is EngineEvent.PUSH_STARTED:
            self.states[index] = WAITING
            return
        if event is not EngineEvent.FAILED:
            self._calls.append((self.engines[index].name, event))
        if event is EngineEvent.PUSH_DONE and self.engines[index].name in REFUSED:
            raise DeadlineError("the router does not list it")
        self.states[index] = EngineState.RESTARTING if event is EngineEvent.FAILED else EngineState.SERVING

    def delist(self, index: int) -> None:
        self._calls.append((self.engines[index].name, "delist"))

    def wait_settled(self, timeout_s: float) -> None:
        assert timeout_s > 0
        for index in self.indices(EngineState.RESTARTING):
            self.replace(index)


@pytest.fixture
def calls(monkeypatch) -> list[Any]:
    """Every call, in order; ``fails`` has those that raise."""
    made: list[Any] = []
    monkeypatch.setattr(memory, "wait_for", lambda call, **_: _answer(made, call))
    return made


FAILS: set[Any] = set()
REFUSED: set[str] = set()
"""Engines that their router does not accept."""


def _answer(made: list[Any], call: Any) -> None:
    made.append(call)
    if call[:2] in FAILS:
        raise EngineError("/flush_cache was refused")


def shared(*groups: Group, tolerant: bool = True) -> SharedMemory:
    return SharedMemory(groups, restart_s=900.0, answer_s=60.0, is_tolerant=tolerant)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def nothing_fails():
    FAILS.clear()
    REFUSED.clear()


def test_an_engine_that_started_after_the_release_releases_too_but_for_what_a_push_needs(calls):
    group = Group(calls, "a", "b")
    lent = shared(group)
    lent.release()
    group.replace(1)
    lent.release_started()
    lent.release_started()
    assert calls == [("a", RELEASE), ("b", RELEASE), ("b+", RELEASE), ("b+", RESUME, ["weights"])]


def test_an_engine_that_has_its_memory_back_lends_it_to_a_trainer_that_starts(calls):
    lent = shared(Group(calls, "a"))
    lent.release()
    lent.take_back(["weights"])
    lent.release_others(list)
    lent.take_back(["kv_cache"])
    lent.release_others(list)
    assert calls == [("a", RELEASE), ("a", RESUME, ["weights"]), ("a", RESUME, ["kv_cache"]), ("a", RELEASE)]


@pytest.mark.parametrize("verb", (RELEASE, RESUME))
def test_a_new_engine_that_fails_over_its_memory_is_replaced_and_does_not_end_the_run(calls, verb):
    group = Group(calls, "a")
    lent = shared(group)
    lent.release()
    group.replace(0)
    FAILS.add(("a+", verb))
    lent.release_started()
    assert calls[-2:] == [("a++", RELEASE), ("a++", RESUME, ["weights"])]
    assert group.indices(*LIVE) == [0]


def test_the_engine_in_the_place_of_one_that_did_not_release_releases_before_the_trainer_gets_the_gpu(calls):
    group = Group(calls, "a", "b")
    FAILS.add(("a", RELEASE))
    shared(group).release()
    assert calls == [("a", RELEASE), ("b", RELEASE), ("a+", RELEASE)]


def test_without_fault_tolerance_the_first_failure_is_raised(calls):
    FAILS.add(("a", RELEASE))
    with pytest.raises(EngineError, match="flush_cache"):
        shared(Group(calls, "a", "b"), tolerant=False).release()
