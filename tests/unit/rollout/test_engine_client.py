"""Requests that bypass the router, sent to real HTTP workers listed by a real router."""

from __future__ import annotations

import asyncio
import threading
from argparse import Namespace

import pytest
import requests

from slime.backends.sglang_utils.router_process import register_worker, start_router
from slime.backends.sglang_utils.server_control import ServerControl
from slime.rollout import config, engine_client
from slime.rollout.config import RolloutConfig
from slime.rollout.engine_client import WorkerPicker, post_to_worker, router_would_drop
from slime.utils import http_utils
from slime.utils.errors import EngineError
from slime.utils.http_utils import HttpStatusError, close_http_client
from slime.utils.net import get_free_port
from tests.scripted_engine.script import Fault, Script
from tests.scripted_engine.server import ScriptedEngine

ROUTER_ARGS = Namespace(
    sglang_router_request_timeout_secs=60, router_policy="round_robin", router_log_level="warn", router_worker_urls=[]
)


@pytest.fixture
def workers():
    engines = [ScriptedEngine(Script(length=4)) for _ in range(3)]
    for engine in engines:
        engine.start()
    yield engines
    for engine in engines:
        engine.stop()


@pytest.fixture
def router(workers):
    handle = start_router(
        ROUTER_ARGS, host="127.0.0.1", port=get_free_port(26600), prometheus_port=get_free_port(27600), timeout_s=60
    )
    for engine in workers:
        register_worker(ServerControl(handle.url), engine.url, worker_type="regular")
    WorkerPicker.clear_instances()
    yield handle
    WorkerPicker.clear_instances()
    handle.stop()


def payload(prompt: list[int]) -> dict:
    return {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 4, "custom_params": {"return_top_p_token_ids": True}},
        "return_logprob": True,
    }


def send(router, prompts: list[list[int]], *, keys: list[str] | None = None, **flags) -> None:
    """Post all at once."""
    args = Namespace(sglang_router_ip=router.host, sglang_router_port=router.port, **flags)

    async def all_of_them():
        try:
            return await asyncio.gather(
                *(
                    post_to_worker(RolloutConfig.of(args), payload(prompt), session_id=keys[i] if keys else None)
                    for i, prompt in enumerate(prompts)
                )
            )
        finally:
            await close_http_client()

    for answer in asyncio.run(all_of_them()):
        assert answer["meta_info"]["finish_reason"]["type"] in ("stop", "length")


def served(workers) -> list[list[tuple[int, ...]]]:
    """The prompts that each worker got."""
    return [[tuple(body["input_ids"]) for body in engine.payloads] for engine in workers]


def counts(workers) -> list[int]:
    return [len(prompts) for prompts in served(workers)]


def test_the_field_arrives_that_the_router_would_have_dropped(router, workers):
    assert router_would_drop(payload([1]))
    send(router, [[1, 2, 3]], router_policy="round_robin")
    (body,) = [body for engine in workers for body in engine.payloads]
    assert body["sampling_params"]["custom_params"] == {"return_top_p_token_ids": True}


@pytest.mark.parametrize("policy", ["round_robin", None])
def test_requests_at_once_are_spread_evenly(router, workers, policy):
    for engine in workers:
        engine.script.seconds_per_token = 0.2  # none is answered before the last is sent
    send(router, [[i] for i in range(12)], router_policy=policy)
    assert counts(workers) == [4, 4, 4]


@pytest.mark.parametrize("policy", ["consistent_hashing", "manual"])
def test_requests_of_one_key_meet_at_one_worker(router, workers, policy):
    prompts = [[i] for i in range(24)]
    send(router, prompts, keys=[f"key {i % 8}" for i in range(24)], router_policy=policy)
    for key in range(8):
        homes = [i for i, got in enumerate(served(workers)) if any(prompt[0] % 8 == key for prompt in got)]
        assert len(homes) == 1
    assert sum(count > 0 for count in counts(workers)) > 1


def test_a_worker_that_has_died_is_left_out_and_its_requests_go_elsewhere(router, workers, monkeypatch):
    monkeypatch.setattr(engine_client, "_POST_RETRIES_PER_WORKER", 0)
    workers[0].stop()
    send(router, [[i] for i in range(9)], router_policy="round_robin")
    assert sum(counts(workers[1:])) == 9


@pytest.mark.parametrize("tolerant", [False, True])
def test_workers_that_all_fail_are_an_error_after_so_many_attempts(router, workers, monkeypatch, caplog, tolerant):
    monkeypatch.setattr(engine_client, "_POST_RETRIES_PER_WORKER", 0)
    monkeypatch.setattr(engine_client, "_RETRY_WAIT_S", 0.001)
    for engine in workers:
        engine.script.faults.append(Fault("status", times=10**6))
    attempts = engine_client._ATTEMPTS
    if tolerant:
        attempts = 60 + 2 + 3 + 1
    flags = dict(engine_start_timeout_s=2.0, rollout_health_check_interval=3.0, rollout_health_check_timeout=1.0)
    with pytest.raises(EngineError, match=rf"No worker answered in {attempts} attempts .*; last: .*503"):
        send(router, [[1]], router_policy="round_robin", use_fault_tolerance=tolerant, **flags)
    assert sum(counts(workers)) == attempts and min(counts(workers)) > 0
    assert "failed" in caplog.text and "trying another" in caplog.text


def test_a_request_that_is_at_fault_is_not_tried_elsewhere(router, workers):
    for engine in workers:
        engine.script.faults.append(Fault("status", status=400, times=9))
    with pytest.raises(HttpStatusError, match="400"):
        send(router, [[1]])
    assert sum(counts(workers)) == 1


@pytest.fixture
def empty_router():
    WorkerPicker.clear_instances()
    handle = start_router(
        ROUTER_ARGS, host="127.0.0.1", port=get_free_port(26700), prometheus_port=get_free_port(27700), timeout_s=60
    )
    yield handle
    WorkerPicker.clear_instances()
    handle.stop()


def test_without_any_worker_a_request_waits_where_engines_are_replaced(empty_router, workers, monkeypatch):
    monkeypatch.setattr(engine_client, "_RETRY_WAIT_S", 0.01)
    monkeypatch.setattr(engine_client, "_ATTEMPTS", 2)
    flags = dict(use_fault_tolerance=True, engine_start_timeout_s=0.0)
    flags |= dict(rollout_health_check_interval=0.0, rollout_health_check_timeout=0.0)
    monkeypatch.setattr(config, "DEFAULT_RETRIES", 1)
    control = ServerControl(empty_router.url)
    late = threading.Timer(1.0, register_worker, [control, workers[0].url], {"worker_type": "regular"})
    late.start()
    send(empty_router, [[1]], **flags)
    late.join()
    assert counts(workers)[0] == 1


@pytest.mark.parametrize("pd_disaggregation", [False, True])
def test_the_router_tells_that_it_has_no_engine_by_a_code_that_requests_wait_for(monkeypatch, pd_disaggregation):
    monkeypatch.setattr(http_utils, "_CLIENT", http_utils._Client(replaces_engines=True))
    router = start_router(
        ROUTER_ARGS, host="127.0.0.1", port=get_free_port(26800), prometheus_port=get_free_port(27800), timeout_s=60,
        pd_disaggregation=pd_disaggregation,
    )  # fmt: skip
    try:
        answer = requests.post(f"{router.url}/generate", json=payload([1]), timeout=60)
    finally:
        router.stop()
    error = HttpStatusError("POST", router.url, answer.status_code, answer.text)
    assert http_utils.waits_for_engines(error), error
