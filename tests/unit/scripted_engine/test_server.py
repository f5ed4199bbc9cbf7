"""The scripted engine behaves as other tests expect."""

import time

import pytest
import requests

from tests.eventually import wait_until
from tests.scripted_engine.script import FIRST_RESPONSE_TOKEN, Fault, Script
from tests.scripted_engine.server import ScriptedEngine


def ask(url, ids, **params):
    payload = {"input_ids": ids, "sampling_params": {"max_new_tokens": 100, **params}, "return_logprob": True}
    return requests.post(f"{url}/generate", json=payload, timeout=10)


def drawn(answer):
    return [(item[1], item[0]) for item in answer.json()["meta_info"]["output_token_logprobs"]]


def test_an_interrupted_response_goes_on_as_if_it_had_not_been():
    with ScriptedEngine(Script(length=9)) as engine:
        whole = drawn(ask(engine.url, [5, 6]))
        first = ask(engine.url, [5, 6], max_new_tokens=4)
        assert first.json()["meta_info"]["finish_reason"]["type"] == "length"
        rest = ask(engine.url, [5, 6] + [token for token, _ in drawn(first)])
        assert drawn(first) + drawn(rest) == whole
        assert rest.json()["meta_info"]["finish_reason"]["type"] == "stop"
        assert len(whole) == 9 and min(token for token, _ in whole) >= FIRST_RESPONSE_TOKEN


def test_an_abort_returns_what_was_drawn_and_a_pause_holds_new_requests():
    from concurrent.futures import ThreadPoolExecutor

    with ScriptedEngine(Script(length=9, hold_after=3, holds=1)) as engine, ThreadPoolExecutor(2) as pool:
        held = pool.submit(ask, engine.url, [5])
        wait_until(lambda: engine.in_flight, "a request in flight")
        requests.post(f"{engine.url}/pause_generation", json={}, timeout=10)
        answer = held.result(10)
        assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(drawn(answer)) == 3
        late = pool.submit(ask, engine.url, [5])
        requests.post(f"{engine.url}/update_weights_from_disk", json={"weight_version": "7"}, timeout=10)
        assert not late.done()
        requests.post(f"{engine.url}/continue_generation", json={}, timeout=10)
        assert late.result(10).json()["meta_info"]["weight_version"] == "7"


def test_streams_are_cumulative_and_end_with_the_finish_reason():
    import json

    with ScriptedEngine(Script(length=6, chunk_tokens=4)) as engine:
        payload = {"input_ids": [5], "sampling_params": {"max_new_tokens": 9}, "stream": True, "return_logprob": True}
        lines = requests.post(f"{engine.url}/generate", json=payload, timeout=10).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(line.removeprefix("data: "))["meta_info"] for line in lines[:-2]]
        assert [len(chunk["output_token_logprobs"]) for chunk in chunks] == [4, 6]
        assert [chunk["finish_reason"] and chunk["finish_reason"]["type"] for chunk in chunks] == [None, "stop"]


@pytest.mark.parametrize("kind", ["die", "hang", "garbage", "half", "slow", "status", "empty"])
def test_each_fault_strikes_once_and_where_it_is_told_to(kind):
    script = Script(length=9, faults=[Fault(kind, requests=[1], seconds=0.2, status=502)])
    engine = ScriptedEngine(script)
    engine.start()
    try:
        assert ask(engine.url, [5]).status_code == 200
        began = time.monotonic()
        if kind in ("die", "half"):
            with pytest.raises((requests.ConnectionError, requests.exceptions.ChunkedEncodingError)):
                ask(engine.url, [5])
        elif kind == "hang":
            with pytest.raises(requests.Timeout):
                requests.post(f"{engine.url}/generate", json={"input_ids": [5]}, timeout=0.3)
        else:
            answer = ask(engine.url, [5])
            assert answer.status_code == (502 if kind == "status" else 200)
            if kind == "garbage":
                with pytest.raises(requests.JSONDecodeError):
                    answer.json()
            assert kind != "empty" or "meta_info" not in answer.json()
            assert kind != "slow" or time.monotonic() - began >= 0.2
        if kind == "die":
            engine.stop()
            port = engine.port
            engine.start()
            assert engine.port == port
        assert len(drawn(ask(engine.url, [5]))) == 9
    finally:
        engine.stop()
