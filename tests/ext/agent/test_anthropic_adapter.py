"""The Anthropic adapter by its documented wire format, with an engine that speaks SGLang's protocol."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from slime.agent.adapters import AnthropicAdapter
from slime.utils.aiohttp_threaded import run_app_in_thread
from slime.utils.types import Sample
from tests.unit.talking_engine import TalkingEngine

CALL = '<think>\nI need the tool.\n</think>\n\n<tool_call>\n{"name":"add","arguments":{"a":1,"b":2}}\n</tool_call>'
TOOL = {"name": "add", "description": "a + b", "input_schema": {"type": "object", "properties": {"a": {}, "b": {}}}}
QUESTION = {
    "model": "claude",
    "max_tokens": 200,
    "system": [{"type": "text", "text": "Be good.", "cache_control": {"type": "ephemeral"}}],
    "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "What is 1 + 2?"}]}],
}


def calculator(prompt):
    return "The tool says 3." if "<tool_response>" in prompt else CALL


class World:
    """Engine, adapter and a plain HTTP client."""

    def __init__(self, tokenizer, say=calculator, faults=(), **kwargs):
        self.engine = TalkingEngine(tokenizer, say, faults=list(faults))
        self.engine.start()
        self.adapter = AnthropicAdapter(tokenizer=tokenizer, sglang_url=self.engine.url, **kwargs)
        for sid in ("s1", "s2"):
            self.adapter.open_session(sid)
        self.server = run_app_in_thread(self.adapter.app, host="127.0.0.1")
        headers = {"x-api-key": "s1", "anthropic-version": "2023-06-01"}
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.server.port}", headers=headers, timeout=20)

    def ask(self, **change):
        return self.http.post("/v1/messages", json={**QUESTION, **change})

    def finish(self):
        return asyncio.run(self.adapter.finish_session("s1", base_sample=Sample(index=1), reward=1.0))

    def close(self):
        self.http.close()
        self.server.stop()
        self.engine.stop()


@pytest.fixture
def world(tokenizer):
    made = []

    def make(**kwargs):
        made.append(World(tokenizer, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_call_of_a_tool_and_its_result_make_one_sample(world):
    here = world()
    first = here.ask().json()
    assert [block["type"] for block in first["content"]] == ["thinking", "tool_use"]
    assert first["content"][1]["input"] == {"a": 1, "b": 2}
    assert (first["stop_reason"], first["role"], first["type"]) == ("tool_use", "assistant", "message")
    result = {
        "type": "tool_result",
        "tool_use_id": first["content"][1]["id"],
        "content": [{"type": "text", "text": "3"}],
    }
    messages = [
        *QUESTION["messages"],
        # Agents send the call back without the thinking.
        {"role": "assistant", "content": first["content"][1:]},
        {"role": "user", "content": [result]},
    ]
    second = here.ask(messages=messages).json()
    assert (second["stop_reason"], second["content"][0]["text"]) == ("end_turn", "The tool says 3.")
    (sample,) = here.finish()
    sent = [payload["input_ids"] for payload in here.engine.payloads]
    replies = list(here.engine.script.replies.values())
    assert sent[1][: len(sent[0]) + len(replies[0])] == sent[0] + replies[0]
    assert sample.tokens == sent[1] + replies[1]
    gap = len(sent[1]) - len(sent[0]) - len(replies[0])
    assert sample.loss_mask == [1] * len(replies[0]) + [0] * gap + [1] * len(replies[1])
    assert first["usage"] == {"input_tokens": len(sent[0]), "output_tokens": len(replies[0])}


def test_the_events_of_a_stream_add_up_to_the_message(world):
    answer = world().ask(stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    records = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    events = [json.loads(lines[1].removeprefix("data: ")) for lines in records]
    assert [lines[0] for lines in records] == [f"event: {event['type']}" for event in events]
    assert events[0]["type"] == "message_start" and events[0]["message"]["content"] == []
    started = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert started == ["thinking", "tool_use"]
    written = "".join(e["delta"].get("partial_json", "") for e in events if e["type"] == "content_block_delta")
    assert json.loads(written) == {"a": 1, "b": 2}
    assert events[-2]["delta"]["stop_reason"] == "tool_use" and events[-2]["usage"]["output_tokens"] > 0
    assert events[-1] == {"type": "message_stop"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": "hello"}, "messages"),
    ],
)
def test_errors_have_anthropics_form(world, change, words):
    answer = world().ask(**change)
    body = answer.json()
    assert (answer.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert words in body["error"]["message"]


def test_after_the_session_the_answer_is_overloaded_and_not_to_be_retried(world):
    here = world(say=lambda prompt: "ok")
    here.ask()
    assert len(here.finish()) == 1
    answer = here.ask()
    assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "false")
    assert answer.json()["error"]["type"] == "overloaded_error"
