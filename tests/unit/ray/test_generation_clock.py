"""Measuring the time in which a rollout's answers were generated."""

from __future__ import annotations

from slime.ray.rollout_work import GenerationClock


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def rollout(clock: Clock, times: GenerationClock, *, seconds: float, is_generated: bool = True) -> float:
    times.begin()
    if is_generated:
        times.generates()
    clock.now_s += seconds
    return times.end()


def test_answers_that_were_not_generated_take_no_time() -> None:
    clock = Clock()
    times = GenerationClock(lambda: None, clock)
    assert rollout(clock, times, seconds=0.01, is_generated=False) == 0
    clock.now_s += 7  # training
    assert rollout(clock, times, seconds=3) == 3


def test_a_function_with_groups_in_flight_generates_between_its_calls() -> None:
    def function() -> None: ...

    function.keeps_groups_in_flight = True  # type: ignore[attr-defined]
    clock = Clock()
    times = GenerationClock(function, clock)
    assert rollout(clock, times, seconds=0.5, is_generated=False) == 0  # generated before a restart
    clock.now_s += 10
    assert rollout(clock, times, seconds=4) == 4, "the first one: nothing was in flight before"
    clock.now_s += 6
    assert rollout(clock, times, seconds=0.25) == 6.25
