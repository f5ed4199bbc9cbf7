"""A user's adapter for another protocol, which uses only the hooks of ``adapters.common.BaseAdapter``."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from aiohttp import web

from slime.agent.adapters import common
from slime.agent.adapters.common import (
    BaseAdapter,
    Reply,
    TurnRecord,
    flatten_content,
    manager_finish_reason,
    tool_call_dict,
)
from slime.agent.harness import HarnessContext
from slime.rollout.parsing import ParsedModelOutput
from slime.utils.aiohttp_threaded import run_app_in_thread
from slime.utils.types import Sample


class WordAdapter(BaseAdapter):
    """``POST /word`` with ``{"text": ..., "who": sid}``."""

    def _register_routes(self, app):
        app.router.add_post("/word", self._run_turn)

    def _session_id(self, request, body):
        return body["who"]

    def _preprocess_body(self, body):
        body["messages"] = [{"role": "user", "content": flatten_content(body["text"])}]

    def _translate(self, body):
        return body["messages"], []

    def _build_reply(self, parsed, raw_finish, translated, tools):
        finish = manager_finish_reason(parsed.tool_uses, raw_finish)
        return Reply({"role": "assistant", "content": parsed.text}, finish, {"word": parsed.text})

    async def _respond(self, request, body, reply, in_tok, out_tok, stream):
        told = {**reply.wire, "why": reply.finish_reason, "in": in_tok, "out": out_tok, "stream": stream}
        return web.json_response(told)


@pytest.fixture
def ask(tokenizer, monkeypatch):
    """Query the adapter; a function replaces ``call_sglang_generate``."""
    calls = []

    async def call(prompt_ids, session, body, *, adapter, session_id):
        params = session.sampling_params(body, len(prompt_ids), adapter.max_token_keys, adapter.stop_keys)
        calls.append((adapter.sglang_url, params["max_new_tokens"], session_id))
        ids = tokenizer.encode("hello<|im_end|>")
        return TurnRecord(list(prompt_ids), ids, "stop", [-0.5] * len(ids))

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


def test_parts_given_by_position_land_where_the_original_has_them():
    assert Reply({"role": "assistant"}, "stop", ["wire"]) == Reply(
        manager_message={"role": "assistant"}, finish_reason="stop", wire=["wire"]
    )
    with pytest.raises(TypeError, match="takes manager_message, finish_reason, wire"):
        Reply({"role": "assistant"}, {"word": "hello"})
    use = {"name": "add", "input": {"a": 1}}
    assert ParsedModelOutput("why", "text", [use], True) == ParsedModelOutput(
        reasoning="why", text="text", tool_uses=[use], ill_formed=True
    )
    turn = TurnRecord(prompt_ids=[1], output_ids=[2], output_log_probs=[-0.5], finish_reason="length")
    assert TurnRecord([1], [2], "length", [-0.5]) == turn == TurnRecord([1], [2], [-0.5], "length")
    assert TurnRecord([1], [2], [-0.5]).finish_reason == "stop"
    assert tool_call_dict("add", arguments='{"a": 1}')["function"] == {"name": "add", "arguments": {"a": 1}}
    assert HarnessContext("/w", "s", "http://host").model_label == "slime-actor"
