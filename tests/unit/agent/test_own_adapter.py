"""An adapter that a user wrote for a protocol of their own: the hooks of ``adapters.common.BaseAdapter`` alone."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from aiohttp import web

from slime.agent.adapters import common
from slime.agent.adapters.common import BaseAdapter, Reply, TurnRecord, flatten_content, manager_finish_reason
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.utils.types import Sample


class WordAdapter(BaseAdapter):
    """``POST /word`` with ``{"text": ..., "who": sid}``."""

    def _register_routes(self, app):
        app.router.add_post("/word", self._run_turn)

    def _session_id(self, request, body):
        return body["who"]

    def _preprocess_body(self, body):
        return {**body, "messages": [{"role": "user", "content": flatten_content(body["text"])}]}

    def _translate(self, body):
        return body["messages"], []

    def _build_reply(self, parsed, raw_finish, translated, tools):
        wire = {"word": parsed.text, "why": manager_finish_reason(parsed.tool_uses, raw_finish)}
        return Reply({"role": "assistant", "content": parsed.text}, wire)

    async def _respond(self, request, body, reply, in_tok, out_tok, stream):
        return web.json_response({**reply.wire, "in": in_tok, "out": out_tok, "stream": stream})


@pytest.fixture
def ask(tokenizer, monkeypatch):
    """Ask the adapter; the engine is a function in the place of ``call_sglang_generate``."""
    calls = []

    async def call(sglang_url, prompt_ids, sampling_params, session_id=None):
        calls.append((sglang_url, sampling_params["max_new_tokens"], session_id))
        ids = tokenizer.encode("hello<|im_end|>")
        return TurnRecord(list(prompt_ids), ids, [-0.5] * len(ids), "stop")

    monkeypatch.setattr(common, "call_sglang_generate", call)
    adapter = WordAdapter(tokenizer=tokenizer, sglang_url="http://engine")
    adapter.open_session("s1")
    server = run_app_in_thread(adapter.app, host="127.0.0.1")

    def post(headers=None, **body):
        body = {"text": "hi", "who": "s1", **body}
        return httpx.post(f"http://127.0.0.1:{server.port}/word", json=body, headers=headers, timeout=20)

    post.adapter, post.calls = adapter, calls
    yield post
    server.stop()


def test_six_hooks_make_an_adapter(ask, tokenizer):
    answer = ask(max_output_tokens=7).json()
    assert (answer["word"], answer["why"], answer["stream"]) == ("hello", "stop", False)
    assert ask.calls == [("http://engine", 7, "s1")]
    (sample,) = asyncio.run(ask.adapter.finish_session("s1", base_sample=Sample(index=0), reward=1.0))
    assert sample.response == "hello<|im_end|>"
    assert sample.rollout_log_probs == [-0.5] * sample.response_length


def test_errors_have_a_form_without_a_hook_for_them(ask):
    answer = ask(max_output_tokens=0)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "max_output_tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("accept", "body", "stream"),
    [
        ("text/event-stream", {}, True),
        ("application/json", {}, False),
        ("text/event-stream", {"stream": False}, False),
        ("application/json", {"stream": True}, True),
    ],
)
def test_a_stream_is_asked_for_by_the_body_or_by_the_header(ask, accept, body, stream):
    assert ask({"Accept": accept}, **body).json()["stream"] is stream


def test_a_turn_ended_by_a_call_of_a_tool_says_so():
    use = {"name": "add", "input": {}}
    assert manager_finish_reason([use], "stop") == "tool_calls"
    assert manager_finish_reason([use], "length") == "length"
    assert manager_finish_reason([], "stop") == manager_finish_reason(None, "stop") == "stop"
