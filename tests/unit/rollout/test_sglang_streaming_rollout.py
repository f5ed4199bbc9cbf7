"""Streamed answers from a scripted engine: the same samples, and what is kept if a stream ends early."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from slime.rollout import sglang_streaming_rollout
from slime.rollout.config import RolloutConfig
from slime.rollout.engine_client import abort_engines
from slime.rollout.sglang_rollout import GenerateState, generate
from slime.rollout.sglang_streaming_rollout import generate_streaming
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.errors import EngineError
from slime.utils.http_utils import close_http_client
from slime.utils.types import Sample
from tests.eventually import until
from tests.scripted_engine.script import Fault, Script
from tests.scripted_engine.server import ScriptedEngine
from tests.unit.rollout.fake_cluster import clear_process, make_args

PARAMS = {"temperature": 1.0, "max_new_tokens": 1000}


@pytest.fixture
def serve(monkeypatch) -> Iterator[Any]:
    engines: list[ScriptedEngine] = []
    monkeypatch.setattr(sglang_streaming_rollout, "RETRY_WAIT_S", 0.01)
    monkeypatch.setattr(sglang_streaming_rollout, "ABORT_POLL_S", 0.02)
    monkeypatch.setattr(sglang_streaming_rollout, "ABORT_GRACE_S", 0.1)

    def start(script: Script, **flags: Any) -> tuple[ScriptedEngine, Any]:
        clear_process(monkeypatch)
        engine = ScriptedEngine(script)
        engine.weight_version = "7"
        engine.start()
        engines.append(engine)
        return engine, make_args(engine.port, **flags)

    yield start
    run(close_http_client())
    for engine in engines:
        engine.stop()


def fields(sample: Sample) -> dict[str, Any]:
    return {name: value for name, value in sample.to_dict().items() if name != "trace"}


@pytest.mark.parametrize("limit", [1000, 9])
def test_a_stream_gives_the_sample_that_the_plain_request_gives(serve, limit):
    _, args = serve(Script(length=30))
    params = PARAMS | {"max_new_tokens": limit}
    streamed = run(generate_streaming(args, Sample(index=0, prompt="abc"), dict(params)))
    plain = run(generate(args, Sample(index=0, prompt="abc"), dict(params)))
    assert fields(streamed) == fields(plain)
    assert streamed.response_length == min(limit, 30) and streamed.weight_versions == ["7"]


def test_an_aborted_stream_keeps_its_tokens_and_goes_on_from_them(serve):
    script = Script(length=30, hold_after=10, holds=1)
    engine, args = serve(script)
    sample = Sample(index=0, prompt="abc")

    async def interrupt() -> None:
        task = asyncio.create_task(generate_streaming(args, sample, dict(PARAMS)))
        await until(lambda: engine.in_flight)
        await asyncio.sleep(0.5)  # ten tokens arrive
        await abort_engines(RolloutConfig.of(args))
        await task

    run(interrupt())
    assert (sample.status, sample.response_length, sample.weight_versions) == (Sample.Status.ABORTED, 10, ["7"])
    run(generate_streaming(args, sample, dict(PARAMS)))
    whole = run(generate(args, Sample(index=0, prompt="abc"), dict(PARAMS)))
    assert sample.tokens == whole.tokens and sample.rollout_log_probs == whole.rollout_log_probs
    assert sample.status == Sample.Status.COMPLETED and sample.weight_versions == ["7", "7"]


def test_an_engine_that_does_not_end_the_stream_when_the_rollout_is_over_is_left(serve):
    engine, args = serve(Script(length=30, hold_after=10))
    sample = Sample(index=0, prompt="abc")

    async def interrupt() -> None:
        task = asyncio.create_task(generate_streaming(args, sample, dict(PARAMS)))
        await until(lambda: engine.in_flight)
        await asyncio.sleep(0.5)  # ten tokens arrive
        GenerateState(args).aborted = True
        await asyncio.wait_for(task, 60)
        await until(lambda: not engine.in_flight)

    run(interrupt())
    assert (sample.status, sample.response_length) == (Sample.Status.ABORTED, 10)


def test_a_stream_that_breaks_goes_on_where_it_broke(serve):
    engine, args = serve(Script(length=40, faults=[Fault("half", requests=[0])]))
    sample = run(generate_streaming(args, Sample(index=0, prompt="abc"), dict(PARAMS)))
    whole = run(generate(args, Sample(index=0, prompt="abc"), dict(PARAMS)))
    assert sample.tokens == whole.tokens and sample.status == Sample.Status.COMPLETED
    first, second = engine.payloads[:2]
    kept = len(second["input_ids"]) - len(first["input_ids"])
    assert 0 < kept < 40 and second["sampling_params"]["max_new_tokens"] == 1000 - kept


def test_a_stream_that_stops_is_left_at_its_deadline_and_goes_on_where_it_stopped(serve, monkeypatch, caplog):
    monkeypatch.setattr(http_utils, "POST_TIMEOUT_S", 1.0)
    engine, args = serve(Script(length=30, hold_after=10, holds=1))
    sample = run(generate_streaming(args, Sample(index=3, prompt="abc"), dict(PARAMS)))
    whole = run(generate(args, Sample(index=3, prompt="abc"), dict(PARAMS)))
    assert sample.tokens == whole.tokens and sample.rollout_log_probs == whole.rollout_log_probs
    assert len(engine.payloads) == 3 and "The stream of sample 3 broke; it continues from 10 tokens" in caplog.text


@pytest.mark.parametrize("tolerant", [False, True])
def test_streams_that_break_without_an_end_are_an_error_after_as_many_tries_as_of_a_plain_request(
    serve, monkeypatch, tolerant
):
    monkeypatch.setattr(http_utils, "RETRY_WAIT_S", 0.001)
    script = Script(length=30, faults=[Fault("status", times=10**6)])
    engine, args = serve(script, use_fault_tolerance=tolerant, engine_start_timeout_s=3.0)
    asked = []
    for ask in (generate_streaming, generate):
        before = len(engine.payloads)
        with pytest.raises(EngineError, match="503"):
            run(ask(args, Sample(index=0, prompt="abc"), dict(PARAMS)))
        asked.append(len(engine.payloads) - before)
    assert asked[0] == asked[1] == RolloutConfig.of(args).request_retries + 1 >= 61


def test_a_cancelled_request_keeps_what_had_arrived(serve):
    engine, args = serve(Script(length=30, hold_after=10))
    sample = Sample(index=0, prompt="abc")

    async def cancel() -> None:
        task = asyncio.create_task(generate_streaming(args, sample, dict(PARAMS)))
        await until(lambda: engine.in_flight)
        await asyncio.sleep(0.5)  # ten tokens arrive
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(cancel())
    assert (sample.status, sample.response_length) == (Sample.Status.ABORTED, 10)
