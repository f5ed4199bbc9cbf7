"""When an engine counts as hung without fault tolerance.  No cluster: the test scripts the engine's answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from slime.ray.engines import monitor as monitor_module
from slime.ray.engines.lifecycle import EngineEvent, EngineState
from slime.ray.engines.monitor import StallMonitor
from slime.utils.errors import EngineError
from tests.eventually import wait_until


class Engine:
    """Answers, or does not."""

    is_well = True

    def __init__(self) -> None:
        self.health_generate = self
        self.num_asked = 0

    def remote(self, timeout_s: float) -> Engine:
        self.num_asked += 1
        return self


class Group:
    """Two serving engines."""

    def __init__(self) -> None:
        self.engines = [Engine(), Engine()]
        self.is_listed = [True, True]
        self.failed: str | None = None

    def indices(self, *states: EngineState) -> list[int]:
        return [0, 1]

    def name_of(self, index: int) -> str:
        return f"engine {index}"

    def report(self, index: int, event: EngineEvent, reason: str) -> None:
        if event is EngineEvent.FAILED:
            self.failed = f"{index}: {reason}"


def wait_for(engine: Engine, *, what: str, timeout_s: float) -> None:
    if not engine.is_well:
        raise EngineError("no answer")


StartMonitor = Callable[..., tuple[StallMonitor, Group]]


@pytest.fixture
def start(monkeypatch) -> Iterator[StartMonitor]:
    monkeypatch.setattr(monitor_module, "wait_for", wait_for)
    monitors: list[StallMonitor] = []

    def start(stall_timeout_s: float) -> tuple[StallMonitor, Group]:
        group = Group()
        waits = {"interval_s": 0.02, "timeout_s": 0.01, "stall_timeout_s": stall_timeout_s}
        monitors.append(StallMonitor(group, **waits))  # type: ignore[arg-type]
        return monitors[-1], group

    yield start
    for monitor in monitors:
        monitor.stop()


def test_an_engine_that_says_nothing_for_the_whole_time_is_named(start):
    monitor, group = start(0.2)
    group.engines[1].is_well = False
    monitor.resume()
    wait_until(lambda: group.failed)
    assert group.failed.startswith("1: it has shown no sign of life for")
    assert "--rollout-stall-timeout-s 0.2" in group.failed and "no answer" in group.failed


def test_one_answer_in_between_begins_the_time_anew(start):
    monitor, group = start(3600.0)
    engine = group.engines[0]
    monitor.resume()
    for _ in range(3):
        engine.is_well = False
        asked = engine.num_asked
        wait_until(lambda asked=asked: engine.num_asked > asked + 2)
        silent_since_s = monitor._alive_s[0]
        engine.is_well = True
        wait_until(lambda before=silent_since_s: monitor._alive_s[0] > before)
    assert group.failed is None


def test_a_paused_engine_is_not_asked_and_its_silence_does_not_count(start):
    monitor, group = start(1.0)
    monitor.resume()
    wait_until(lambda: group.engines[0].num_asked)
    monitor.pause()
    group.engines[0].is_well = False
    time.sleep(0.3)
    asked = group.engines[0].num_asked
    time.sleep(1.2)
    assert group.engines[0].num_asked == asked and group.failed is None
    group.engines[0].is_well = True
    monitor.resume()
    wait_until(lambda: group.engines[0].num_asked > asked)
    assert group.failed is None


def test_an_engine_that_is_being_registered_is_not_asked(start):
    monitor, group = start(0.1)
    group.engines[0].is_well, group.is_listed[0] = False, False
    monitor.resume()
    wait_until(lambda: group.engines[1].num_asked > 3)
    assert group.engines[0].num_asked == 0 and group.failed is None
    group.is_listed[0] = True
    wait_until(lambda: group.failed)
