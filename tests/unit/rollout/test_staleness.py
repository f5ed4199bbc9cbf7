"""Weight versions of samples, engines and trainer, and the schedule that bounds their distance."""

from __future__ import annotations

import random
import socket
from argparse import Namespace

import pytest

from slime.rollout import engine_client
from slime.rollout.config import RolloutConfig
from slime.rollout.staleness import (
    StalenessBound,
    VersionClock,
    back_to_prompt,
    num_groups_allowed,
    num_groups_due,
    oldest_version,
)
from slime.utils.async_utils import run
from slime.utils.types import Sample
from tests.scripted_engine.script import Script
from tests.scripted_engine.server import ScriptedEngine


def drawn(*versions: str, tokens: int = 4, **fields) -> Sample:
    values = {"tokens": [1, 2, *range(tokens)], "response_length": tokens, "weight_versions": list(versions)}
    return Sample(**values, **fields)


def test_the_oldest_version_is_that_of_a_trained_token():
    assert oldest_version([drawn("4", "5"), drawn("7")]) == 4
    assert oldest_version([drawn("4", remove_sample=True), drawn("7")]) == 7
    assert oldest_version([drawn("4", tokens=0), drawn("7")]) == 7
    assert oldest_version([[drawn("9"), drawn("6")], drawn("7")]) == 6
    assert oldest_version(drawn("default")) is None
    masked = drawn("4", "5", "8")
    masked.num_untrained_calls = 2
    assert oldest_version(masked) == 8


def loop(interval: int, start: int, num_rollouts: int, *, ahead: bool) -> list[tuple[int, int, int]]:
    """(rollout, the engines' version when it begins, the trainer's version when it is trained)."""
    version, begun, trained = start + 1, {start: start + 1}, {}
    for k in range(start, start + num_rollouts):
        if ahead:
            begun[k + 1] = version
        trained[k] = version
        if (k + 1) % interval == 0 or not ahead:
            version += 1
        begun.setdefault(k + 1, version)
    return [(k, begun[k], trained[k]) for k in trained]


@pytest.mark.parametrize("start", [0, 3, 10])
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_the_clock_knows_what_the_trainer_will_hold_in_a_loop_that_generates_ahead(interval, start):
    clock = VersionClock(RolloutConfig.of(Namespace(update_weights_interval=interval)), first_rollout_id=start)
    events = loop(interval, start, 12, ahead=True)
    for rollout_id, in_engines, _ in events:
        clock.observe(in_engines, rollout_id)
        assert clock.current == in_engines
        assert [clock.trained_at(k) for k, _, _ in events] == [trained for _, _, trained in events]


def test_the_clock_knows_it_too_when_each_rollout_is_pushed_before_the_next_begins():
    clock = VersionClock(RolloutConfig.of(Namespace(update_weights_interval=1)), first_rollout_id=5)
    for rollout_id, in_engines, trained in loop(1, 5, 6, ahead=False):
        clock.observe(in_engines, rollout_id)
        assert clock.trained_at(rollout_id) == trained == in_engines


def test_the_last_rollout_for_a_version_is_the_last_one_within_the_bound():
    clock = VersionClock(RolloutConfig.of(Namespace(update_weights_interval=3)))
    clock.observe(5, 7)
    for limit in range(4):
        for version in range(3, 9):
            last = clock.last_rollout_within(version, limit)
            assert clock.trained_at(last) - version <= limit < clock.trained_at(last + 1) - version


def test_an_engine_that_does_not_tell_its_version_has_none_until_it_is_asked_again(monkeypatch):
    """One engine hangs, one is missing; then one answers."""
    engine, urls = ScriptedEngine(Script()), ["http://127.0.0.1:9"]
    sessions = engine_client.separate_sessions(max_connections=0, timeout_s=0.3)
    monkeypatch.setattr(engine_client, "_control", sessions)

    async def known(config):
        return urls

    monkeypatch.setattr(engine_client, "worker_urls", known)
    clock = VersionClock(RolloutConfig.of(Namespace(update_weights_interval=1)))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        urls.append(f"http://127.0.0.1:{silent.getsockname()[1]}")
        run(clock.refresh(0))
    assert clock.current is None
    engine.start()
    engine.weight_version = "7"
    urls.append(engine.url)
    run(clock.refresh(1))
    engine.stop()
    run(sessions.close())
    assert clock.current == 7


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_with_both_rules_no_group_is_late_whatever_requests_take(limit):
    """Simulates both loops' order with groups of random duration; time moves only when a batch must wait."""
    dice = random.Random(limit)
    batch_size, num_rollouts, interval = 4, 60, dice.choice([1, 2])
    bound = StalenessBound(
        RolloutConfig.of(Namespace(max_staleness=limit, update_weights_interval=interval)), first_rollout_id=0
    )
    in_flight: list[int] = []
    ready: list[int] = []
    for rollout_id, in_engines, trained in loop(interval, 0, num_rollouts, ahead=True):
        bound.clock.observe(in_engines, rollout_id)
        while True:
            facts = {"rollout_id": rollout_id, "in_flight": in_flight, "kept": ready, "batch_size": batch_size}
            allowed = num_groups_allowed(
                bound, next_rollout_id=rollout_id, num_rollout=num_rollouts, batch_size=batch_size
            )
            in_flight += [in_engines] * int(allowed - len(in_flight) - len(ready))
            if len(ready) >= batch_size and not num_groups_due(bound, **facts):
                break
            assert in_flight, "a batch that waits has something to wait for"
            ready.append(in_flight.pop(dice.randrange(len(in_flight))))
        ready.sort()
        batch, ready = ready[:batch_size], ready[batch_size:]
        assert trained - min(batch) <= limit
    assert not ready and not in_flight


def test_a_sample_that_goes_back_to_its_prompt_keeps_only_what_it_was_issued_with():
    metadata = {"a": 1, "start_rollout_id": 0, "reward_error": "TimeoutError"}
    sample = drawn("3", index=7, group_index=2, prompt="p", label="l", metadata=metadata)
    sample.response, sample.loss_mask, sample.rollout_log_probs, sample.reward = "text", [1] * 4, [-1.0] * 4, 1.0
    sample.status, sample.session_id = Sample.Status.TRUNCATED, "s"
    fresh = back_to_prompt(sample)
    expected = Sample(index=7, group_index=2, prompt="p", label="l", metadata={"a": 1}, tokens=[1, 2], session_id="s")
    assert fresh is sample and fresh == expected
