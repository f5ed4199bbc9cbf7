"""Hostile requests that an agent, which runs model output, may send: each gets the protocol's error, never a crash."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.agent.adapters.common import MAX_PROMPT_CHARS
from slime.utils.aiohttp_threaded import run_app_in_thread
from tests.unit.talking_engine import TalkingEngine
from tests.unit.utils.test_hostile_input import DEEP, DIGITS, ODD

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
OPENAI = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "description": "d", "parameters": SCHEMA}}],
    "max_tokens": 5, "stop": ["x"], "stream": False, "n": 1, "tool_choice": "auto",
}  # fmt: skip
STREAM = {
    "messages": [{"role": "user", "content": "q"}], "model": "m", "max_tokens": 5, "stream": True,
    "stream_options": {"include_usage": True}, "response_format": {"type": "text"}, "metadata": {"session_id": "s"},
    "user": "u",
}  # fmt: skip
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "3"}]}
ANTHROPIC = {
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [RESULT]},
    ],
    "tools": [{"name": "add", "description": "d", "input_schema": SCHEMA}],
    "max_tokens": 5, "stop_sequences": ["x"], "stream": False, "tool_choice": {"type": "auto"},
}  # fmt: skip
LONG = "x" * (MAX_PROMPT_CHARS + 1)
LONG_CALL = {"type": "function", "function": {"name": "add", "arguments": json.dumps({"a": LONG})}}
LONG_BODIES = (
    {"messages": [{"role": "user", "content": LONG}]},
    {"messages": [{"role": "user", "content": "q"}], "tools": [{"function": {"name": "add", "description": LONG}}]},
    {"messages": [{"role": "assistant", "content": "", "tool_calls": [LONG_CALL]}]},
)
BROKEN = {
    "nothing": "", "nested": DEEP, "a giant number": f'{{"a": {DIGITS}}}', "UTF-16": "{}".encode("utf-16"),
    "a key twice": '{"messages": [], "messages": [{"role": "user", "content": "x"}]}', "a list": "[]", "NaN": "NaN",
    "half a pair": '{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "four megabytes": json.dumps(LONG_BODIES[0]),
}  # fmt: skip


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a body."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from paths(value[key], (*path, key))


def put(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    """The body with another value at a path."""
    if not path:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(value[path[0]], path[1:], odd)
    return copy


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        (OpenAIAdapter, "/v1/chat/completions", OPENAI),
        (OpenAIAdapter, "/v1/chat/completions", STREAM),
        (AnthropicAdapter, "/v1/messages", ANTHROPIC),
    ],
)
def test_no_body_is_a_failure_of_the_adapter(kind, path, body, tokenizer):
    engine = TalkingEngine(tokenizer, lambda prompt: "hi")
    engine.start()
    adapter = kind(tokenizer=tokenizer, sglang_url=f"{engine.url}/generate")
    server = run_app_in_thread(adapter.app, host="127.0.0.1")
    try:
        with requests.Session() as client:
            number = 0

            def ask(data: str | bytes) -> requests.Response:
                nonlocal number
                number += 1
                adapter.open_session(str(number))
                headers = {"Authorization": f"Bearer {number}", "Content-Type": "application/json"}
                return client.post(f"http://127.0.0.1:{server.port}{path}", data=data, headers=headers, timeout=20)

            assert ask(json.dumps(body)).status_code == 200
            for name, data in BROKEN.items():
                answer = ask(data)
                assert answer.status_code == 400 and "\\n" not in answer.text, (name, answer.text[:300])
            for place in paths(body):
                for name, odd in ODD.items():
                    answer = ask(json.dumps(put(body, place, odd)))
                    assert answer.status_code in (200, 400), (place, name, answer.text[:300])
    finally:
        server.stop()
        engine.stop()


ODD_PARAMETERS = [
    {key: value}
    for key, values in {
        "temperature": [True, "1", -1, 1e9, [1]],
        "top_p": [True, 0, 1.5, "x"],
        "top_k": [True, 0, -2, 2**31, 2**63, 1.0, [1]],
        "min_p": [-0.1, 2],
        "presence_penalty": [-3, True],
        "frequency_penalty": [3, {}],
        "max_tokens": [True, 0, -1, 1.0, 2**31, "5"],
        "stop": [5, True, [5], [["x"]], {"a": 1}, ["x"] * 33, "x" * 1025, [None]],
        "n": [True, 2, 0, 1.0, "1"],
        "stream": [1, "true", []],
        "messages": [[], "x", {}, [{"role": "user", "content": "q"}] * 10_001],
        "tools": [[{"type": "function", "function": {"name": "f"}}] * 1001],
    }.items()
    for value in values
]


def test_a_parameter_of_another_type_or_out_of_its_range_never_reaches_the_engine(tokenizer):
    engine = TalkingEngine(tokenizer, lambda prompt: "hi")
    engine.start()
    adapter = OpenAIAdapter(tokenizer=tokenizer, sglang_url=f"{engine.url}/generate")
    adapter.open_session("default")
    server = run_app_in_thread(adapter.app, host="127.0.0.1")
    try:
        with requests.Session() as client:
            address = f"http://127.0.0.1:{server.port}/v1/chat/completions"
            for odd in ODD_PARAMETERS:
                answer = client.post(address, json={"messages": [{"role": "user", "content": "q"}]} | odd, timeout=20)
                assert answer.status_code == 400, (str(odd)[:100], answer.text[:300])
            assert engine.payloads == []
            fine = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0.1, "stop": ["x"], "n": 1, "stream": False}
            answer = client.post(address, json={"messages": [{"role": "user", "content": "q"}], **fine}, timeout=20)
            assert answer.status_code == 200, answer.text
    finally:
        server.stop()
        engine.stop()
