from __future__ import annotations

import inspect
import json
import pickle
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests

from slime.backends.sglang_utils.server_control import (
    CONTROL_TIMEOUT_S,
    PROBE_TIMEOUT_S,
    NoAnswer,
    Refused,
    ServerControl,
    flush_cache,
    probe_answer,
)
from slime.utils.errors import EngineError
from tests.scripted_engine.script import Fault, Script
from tests.scripted_engine.server import ScriptedEngine


@pytest.fixture
def scripted():
    """A server that answers with the next (status, body) of a list, and records requests."""
    answers: list[tuple[int, str]] = []
    asked: list[tuple[str, str, str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def _serve(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            asked.append((self.command, self.path, body, self.headers.get("Authorization")))
            status, text = answers.pop(0)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = do_DELETE = _serve

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", answers, asked
    server.shutdown()


def test_json_is_parsed_and_text_is_given_as_it_is(scripted):
    url, answers, asked = scripted
    answers += [(200, '{"a": 1}'), (200, "Cache flushed.")]
    server = ServerControl(url, api_key="secret")
    assert server.post("/x", {"b": 2}) == {"a": 1}
    assert server.get("/y") == "Cache flushed."
    assert asked == [("POST", "/x", '{"b": 2}', "Bearer secret"), ("GET", "/y", "", "Bearer secret")]


def test_a_refusal_carries_status_and_reason(scripted):
    url, answers, _ = scripted
    answers.append((400, '{"message": "no such group"}'))
    with pytest.raises(EngineError, match=r"engine 3 refused POST /x with status 400: .*no such group"):
        ServerControl(url, name="engine 3").post("/x")


def test_a_request_is_sent_once_whatever_comes_of_it_and_left_at_its_deadline(scripted):
    url, answers, asked = scripted
    answers.append((503, "busy"))
    with pytest.raises(EngineError, match="busy"):
        ServerControl(url).post("/update_weights_from_disk")
    assert len(asked) == 1
    with ScriptedEngine(Script(faults=[Fault("hang", times=9)])) as engine:
        body = {"input_ids": [1], "sampling_params": {}}
        with pytest.raises(NoAnswer, match="did not answer POST /generate within 0.3 s"):
            ServerControl(engine.url).post("/generate", body, timeout_s=0.3)
        assert len(engine.payloads) == 1
    for method in ("get", "post", "delete"):
        assert inspect.signature(getattr(ServerControl, method)).parameters["timeout_s"].default == CONTROL_TIMEOUT_S


@pytest.mark.parametrize(("timeout_s", "connect_s"), [(5.0, 5.0), (600.0, PROBE_TIMEOUT_S)])
def test_a_host_that_is_silent_is_left_at_the_deadline_too(monkeypatch, timeout_s, connect_s):
    def silent(session, method, url, *, timeout, **options):
        assert timeout == (connect_s, timeout_s)
        raise requests.ConnectTimeout

    monkeypatch.setattr(requests.Session, "request", silent)
    with pytest.raises(NoAnswer, match=rf"took no connection for GET /health within {connect_s:g} s"):
        ServerControl("http://127.0.0.1:1").get("/health", timeout_s=timeout_s)


def test_flushing_is_tried_again_while_the_server_is_busy(scripted):
    url, answers, asked = scripted
    answers += [(400, "busy"), (400, "busy"), (200, "Cache flushed.")]
    flush_cache(ServerControl(url), wait_s=0)
    assert len(asked) == 3


def one_token(log_prob: str = "-0.5", finish: str = '{"type": "length"}', items: str | None = None) -> str:
    items = f"[[{log_prob}, 7, null]]" if items is None else items
    return f'{{"text": "x", "meta_info": {{"finish_reason": {finish}, "output_token_logprobs": {items}}}}}'


@pytest.mark.parametrize("answer", [one_token(), one_token(items="[]", finish='{"type": "abort"}')])
def test_one_token_or_an_abort_is_a_sensible_answer(scripted, answer):
    url, answers, asked = scripted
    answers.append((200, answer))
    probe_answer(ServerControl(url), timeout_s=10)
    assert json.loads(asked[0][2])["sampling_params"]["max_new_tokens"] == 1


@pytest.mark.parametrize(
    "answer",
    [
        "<html>busy</html>",
        "[]",
        "{}",
        '{"meta_info": {}}',
        one_token(finish="null"),
        one_token(items="[]"),
        one_token(log_prob="NaN"),
        one_token(items='[[-0.5, "seven", null]]'),
    ],
)
def test_anything_else_is_nonsense(scripted, answer):
    url, answers, _ = scripted
    answers.append((200, answer))
    with pytest.raises(EngineError, match="e answered a request for one token with"):
        probe_answer(ServerControl(url, name="e"), timeout_s=10)


def test_a_refused_probe_is_a_fault_and_a_late_answer_is_not(scripted):
    url, answers, _ = scripted
    answers.append((500, "scheduler gone"))
    with pytest.raises(EngineError, match="scheduler gone"):
        probe_answer(ServerControl(url), timeout_s=10)
    with ScriptedEngine(Script(faults=[Fault("hang")])) as engine:
        probe_answer(ServerControl(engine.url), timeout_s=0.5)


def test_a_refusal_crosses_processes_whole() -> None:
    error = pickle.loads(pickle.dumps(Refused("engine 0 refused GET /health_generate with status 503", 503)))
    assert (str(error), error.status) == ("engine 0 refused GET /health_generate with status 503", 503)
