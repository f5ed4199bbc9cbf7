"""Only the job may open a session of an adapter."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter, common
from slime.agent.adapters.sessions import AdapterError, SessionBook
from slime.utils.aiohttp_threaded import run_app_in_thread
from slime.utils.net import get_current_node_ip
from slime.utils.types import Sample


@pytest.mark.parametrize("kind", [OpenAIAdapter, AnthropicAdapter])
def test_no_route_of_an_adapter_on_the_network_gives_a_stranger_a_token(kind, tokenizer):
    adapter = kind(tokenizer=tokenizer, sglang_url="http://127.0.0.1:9")
    adapter.open_session("opened")
    server = run_app_in_thread(adapter.app)
    routes = {(route.method, route.resource.canonical) for route in adapter.app.router.routes()}
    body, found = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}, {}
    with httpx.Client(base_url=f"http://{get_current_node_ip()}:{server.port}", trust_env=False) as client:
        for method, path in sorted(routes):
            for key in ({}, {"Authorization": "Bearer guess"}, {"x-api-key": "guess"}):
                answer = client.request(method, path, json=body, headers=key, timeout=20)
                if answer.is_success and method != "HEAD":
                    found[path] = answer.json()
    server.stop()
    told = found.pop("/v1/models")["data"], found.pop("/healthz"), found.pop("/v1/messages/count_tokens", None)
    assert found == {} and len(routes) >= 5
    assert [model["id"] for model in told[0]] == ["slime"] and told[2] in (None, {"input_tokens": 0})


def test_a_stranger_gets_no_turn_of_an_adapter_on_the_network(tokenizer, monkeypatch):
    """Through a socket that listens everywhere, as ``run_app_in_thread`` does by default."""

    async def call(prompt_ids, session, body, *, adapter, session_id):
        ids = tokenizer.encode("hello<|im_end|>")
        return common.TurnRecord(list(prompt_ids), ids, "stop", [-0.5] * len(ids))

    monkeypatch.setattr(common, "call_sglang_generate", call)
    adapter = OpenAIAdapter(tokenizer=tokenizer, sglang_url="http://engine")
    adapter.open_session("opened")
    server = run_app_in_thread(adapter.app)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    address, found = get_current_node_ip(), []
    for host, sid in ((address, "guess"), (address, "opened"), ("127.0.0.1", "guess")):
        url, key = f"http://{host}:{server.port}/v1/chat/completions", {"Authorization": f"Bearer {sid}"}
        found.append(httpx.post(url, json=body, headers=key, timeout=20, trust_env=False).status_code)
    server.stop()
    assert found == [401, 200, 401]


def test_a_turn_that_was_admitted_while_its_session_closed_is_refused_and_leaves_nothing(tokenizer, monkeypatch):
    async def call(prompt_ids, session, body, *, adapter, session_id):
        ids = tokenizer.encode("hello<|im_end|>")
        return common.TurnRecord(list(prompt_ids), ids, "stop", [-0.5] * len(ids))

    admit, admitted, closed = SessionBook.admit, threading.Event(), threading.Event()

    def admit_slowly(book, sid):
        session = admit(book, sid)
        admitted.set()
        assert closed.wait(20)
        return session

    monkeypatch.setattr(common, "call_sglang_generate", call)
    monkeypatch.setattr(SessionBook, "admit", admit_slowly)
    adapter = OpenAIAdapter(tokenizer=tokenizer, sglang_url="http://engine")
    adapter.open_session("s")
    server = run_app_in_thread(adapter.app)
    url, key = f"http://127.0.0.1:{server.port}/v1/chat/completions", {"Authorization": "Bearer s"}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, url, json=body, headers=key, timeout=20, trust_env=False)
        assert admitted.wait(20)
        assert asyncio.run(adapter.finish_session("s", base_sample=Sample())) == []
        closed.set()
        assert answer.result().status_code == 503
    server.stop()
    assert not adapter.manager.has_session("s")


def test_a_session_can_be_opened_again_after_it_was_dropped_or_finished(tokenizer):
    adapter = OpenAIAdapter(tokenizer=tokenizer, sglang_url="http://engine")
    for end in (adapter.drop_session("s"), adapter.finish_session("s", base_sample=Sample(index=0))):
        adapter.open_session("s")
        with pytest.raises(ValueError, match="'s' is open already"):
            adapter.open_session("s")
        asyncio.run(end)
    with pytest.raises(AdapterError, match="is closed"):
        adapter._sessions.admit("s")
    adapter.open_session("s")
    assert adapter._sessions.admit("s").num_turns == 1
