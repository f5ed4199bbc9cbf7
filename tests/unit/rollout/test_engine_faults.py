"""Requests while an engine fails, and while another replaces it."""

from __future__ import annotations

import asyncio
import threading
import time
from argparse import Namespace

import pytest

from slime.rollout import config, engine_request, sglang_rollout
from slime.rollout.config import DEFAULT_RETRIES, RolloutConfig
from slime.utils.errors import DataError, EngineError
from slime.utils.http_utils import HttpStatusError, close_http_client
from slime.utils.types import Sample
from tests.scripted_engine.script import Fault, Script
from tests.scripted_engine.server import ScriptedEngine


class State:
    """The part of GenerateState that ``generate`` needs for a sample that has its tokens."""

    tokenizer = processor = None
    aborted = False

    def __init__(self, args: Namespace) -> None:
        pass


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch):
    monkeypatch.setattr(sglang_rollout, "GenerateState", State)


def flags(engine: ScriptedEngine, **given) -> Namespace:
    base = {
        "sglang_router_ip": engine.host,
        "sglang_router_port": engine.port,
        "use_fault_tolerance": True,
        "rollout_health_check_interval": 5.0,
        "rollout_health_check_timeout": 5.0,
        "engine_start_timeout_s": 60.0,
    }
    return Namespace(**base | given)


def ask(args: Namespace, sample: Sample | None = None) -> Sample:
    sample = sample or Sample(index=3, tokens=[1, 2, 3])

    async def once():
        try:
            return await sglang_rollout.generate(args, sample, {"max_new_tokens": 16, "temperature": 1.0})
        finally:
            await close_http_client()

    return asyncio.run(once())


@pytest.mark.parametrize("kind", ["garbage", "empty", "half"])
def test_with_fault_tolerance_an_answer_that_cannot_be_used_is_asked_for_again(monkeypatch, kind):
    monkeypatch.setattr(engine_request, "BAD_ANSWER_WAIT_S", 0.01)
    with ScriptedEngine(Script(length=6, faults=[Fault(kind, times=2)])) as engine:
        sample = ask(flags(engine))
    assert sample.status is Sample.Status.COMPLETED and sample.response_length == 6
    assert len(engine.payloads) == 3
    assert all(payload["input_ids"] == [1, 2, 3] for payload in engine.payloads)


@pytest.mark.parametrize("kind", ["garbage", "empty"])
def test_without_it_such_an_answer_is_an_error_at_once(kind):
    with ScriptedEngine(Script(length=6, faults=[Fault(kind)])) as engine:
        with pytest.raises(EngineError, match="sample 3 cannot be used"):
            ask(flags(engine, use_fault_tolerance=False))
    assert len(engine.payloads) == 1


def test_nonsense_without_an_end_is_an_error_when_the_monitor_has_had_its_time(monkeypatch):
    monkeypatch.setattr(engine_request, "BAD_ANSWER_WAIT_S", 0.01)
    monkeypatch.setattr(config, "BAD_ANSWER_MARGIN_S", 1.0)
    with ScriptedEngine(Script(faults=[Fault("garbage", times=10**6)])) as engine:
        args = flags(engine, rollout_health_check_interval=0.1, rollout_health_check_timeout=0.1)
        with pytest.raises(EngineError, match="cannot be used"):
            ask(args)
    assert len(engine.payloads) > 2


def test_a_request_outlives_its_engine_and_keeps_what_the_sample_held():
    engine = ScriptedEngine(Script(length=20, faults=[Fault("die")]))
    engine.start()
    first = Sample(index=3, tokens=[1, 2, 3])
    with ScriptedEngine(Script(length=20, hold_after=None)) as healthy:
        whole = ask(flags(healthy), first)
    # Half of the response came back before (a partial rollout); the engine dies during the rest, and restarts.
    half = Sample(index=4, tokens=whole.tokens[:13], response_length=10, status=Sample.Status.ABORTED)
    half.rollout_log_probs = whole.rollout_log_probs[:10]
    half.loss_mask = None
    starter = threading.Thread(target=lambda: (time.sleep(2.5), engine.start()))
    starter.start()
    finished = ask(flags(engine), half)
    starter.join()
    engine.stop()
    assert finished.tokens == whole.tokens[: len(finished.tokens)]
    assert finished.tokens[:13] == whole.tokens[:13]
    assert [payload["input_ids"] for payload in engine.payloads] == [whole.tokens[:13]] * 2


def test_requests_are_repeated_for_as_long_as_an_engine_may_take_to_start():
    tolerant = RolloutConfig.of(
        Namespace(
            use_fault_tolerance=True,
            engine_start_timeout_s=600.0,
            rollout_health_check_interval=30.0,
            rollout_health_check_timeout=30.0,
        )
    )
    assert tolerant.request_retries == DEFAULT_RETRIES + 660
    assert tolerant.bad_answer_patience_s == 90.0
    assert RolloutConfig.of(Namespace()).request_retries == DEFAULT_RETRIES
    assert RolloutConfig.of(Namespace()).bad_answer_patience_s == 0.0


@pytest.mark.parametrize(
    ("value", "field"), [(0.5, r"output_token_logprobs'\]\[0\] has the log-prob 0.5"), (float("nan"), "log-prob nan")]
)
def test_an_answer_with_impossible_numbers_is_asked_for_again_or_ends_the_run(monkeypatch, value, field):
    monkeypatch.setattr(engine_request, "BAD_ANSWER_WAIT_S", 0.01)
    bad = iter([value])
    script = Script(length=6, log_prob=lambda token, position: next(bad, -0.5))
    with ScriptedEngine(script) as engine:
        sample = ask(flags(engine))
        assert sample.response_length == 6 and max(sample.rollout_log_probs) < 0
        assert len(engine.payloads) == 2, "not asked again"
        bad = iter([value])
        with pytest.raises(EngineError, match=rf"sample 3 cannot be used \(request \w+.*http://.*{field}"):
            ask(flags(engine, use_fault_tolerance=False))


@pytest.mark.parametrize("max_context", [2, 18])  # 3 tokens, and 16 that may be drawn
def test_a_prompt_longer_than_the_context_is_refused_with_the_flag_that_leaves_it_out(max_context):
    with ScriptedEngine(Script(length=6, max_context=max_context)) as engine:
        with pytest.raises(DataError, match=r"prompt of sample 3 .*context length.*--rollout-max-prompt-len N"):
            ask(flags(engine))
        assert len(engine.payloads) == 1
        continued = Sample(index=3, tokens=[1] * 19, response="c", response_length=2)
        with pytest.raises(HttpStatusError, match="400"):  # the prompt is valid
            ask(flags(engine), continued)
