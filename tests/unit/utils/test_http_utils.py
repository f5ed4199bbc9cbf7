"""The HTTP client against a minimal local server."""

import asyncio
from argparse import Namespace

import httpx
import pytest
import requests
from aiohttp import web

from slime.utils import http_utils
from slime.utils.errors import EngineError
from tests.http_server import served


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(http_utils, "RETRY_WAIT_S", 0.01)
    monkeypatch.setattr(http_utils, "_CLIENT", http_utils._Client())


class Server:
    """Answers requests from a list, and records them."""

    def __init__(self, answers):
        self.answers = list(answers)
        self.seen = []
        self.keys = []

    async def handle(self, request):
        body = await request.json() if request.method == "POST" else None
        self.seen.append((request.method, body, request.headers.get("X-SMG-Routing-Key")))
        self.keys.append(request.headers.get("Authorization"))
        status, content = self.answers.pop(0)
        if status == "hang":
            await asyncio.sleep(5)
        if isinstance(content, str):
            return web.Response(status=status, text=content)
        return web.json_response(content, status=status)


def talk(answers, conversation):
    """Run ``conversation(url)`` against a server with these answers; return its result and the server."""

    async def main():
        server = Server(answers)
        async with served(server.handle) as port:
            return await conversation(f"http://127.0.0.1:{port}/x"), server

    return asyncio.run(main())


def test_a_busy_server_is_asked_again():
    result, server = talk([(503, "busy"), (500, "oops"), (200, {})], lambda url: http_utils.post(url, {}))
    assert result == {}
    assert len(server.seen) == 3


def test_a_refusal_is_not_repeated_and_shows_what_the_server_said():
    async def conversation(url):
        with pytest.raises(http_utils.HttpStatusError, match="status 400: prompt too long") as caught:
            await http_utils.post(url, {})
        return caught.value.status

    status, server = talk([(400, "prompt too long")], conversation)
    assert status == 400
    assert len(server.seen) == 1


def test_retries_end_with_one_error_that_names_url_attempts_and_cause():
    async def conversation(url):
        with pytest.raises(EngineError, match=r"failed 3 time\(s\).*2 retries.*status 503: busy"):
            await http_utils.post(url, {}, max_retries=2)

    _, server = talk([(503, "busy")] * 3, conversation)
    assert len(server.seen) == 3


@pytest.mark.parametrize("code", http_utils.NO_ENGINE)
def test_a_router_without_engines_is_waited_for_where_these_are_replaced(code, monkeypatch):
    answers = [(503, {"error": {"code": code}})] * 5

    def ask(**limits):
        return talk([*answers, (503, "busy"), (200, {})], lambda url: http_utils.post(url, {}, **limits))

    with pytest.raises(EngineError, match=rf"failed 2 time\(s\).*1 retries.*status 503: .*{code}"):
        ask(max_retries=1)
    http_utils.init_http_client(
        Namespace(sglang_server_concurrency=1, rollout_num_engines=1, use_fault_tolerance=True)
    )
    result, server = ask(max_retries=1)
    assert result == {} and len(server.seen) == 7
    monkeypatch.setattr(http_utils, "RETRY_WAIT_S", 20.0)  # no attempt is running when the deadline comes
    with pytest.raises(EngineError, match=rf"deadline 10 s, 60 retries.*status 503: .*{code}"):
        ask(timeout_s=10.0)


def test_the_deadline_ends_a_request_that_is_never_answered():
    async def conversation(url):
        with pytest.raises(EngineError, match="deadline 0 s.*TimeoutError"):
            await http_utils.post(url, {}, timeout_s=0.2)

    talk([("hang", {})], conversation)


def test_an_installed_transport_is_used_and_replaced_when_it_cannot_serve():
    calls = []

    async def transport(url, payload, max_retries, headers):
        calls.append(payload)
        if payload == {"n": 2}:
            raise http_utils.PostTransportUnavailable("worker lost")
        return "from afar"

    async def conversation(url):
        http_utils.set_post_transport(transport)
        return [await http_utils.post(url, {"n": 1}), await http_utils.post(url, {"n": 2})]

    results, server = talk([(200, "from here")], conversation)
    assert results == ["from afar", "from here"]
    assert calls == [{"n": 1}, {"n": 2}]
    assert len(server.seen) == 1


def job_of(router_port=4000, **more):
    engines = {"sglang_server_concurrency": 8, "rollout_num_engines": 1}
    router = {"sglang_router_ip": "127.0.0.1", "sglang_router_port": router_port}
    return Namespace(job_secret="s3cret", **engines, **router, **more)


def test_the_servers_of_the_job_get_its_secret_and_no_other_server_does():
    http_utils.init_http_client(job_of(sglang_model_routers={"judge": ("[fd00::7]", 4001)}))
    http_utils.add_job_servers("http://127.0.0.1:5000")
    header = {"Authorization": "Bearer s3cret"}
    for url in ("http://127.0.0.1:4000/generate", "http://[fd00::7]:4001", "http://127.0.0.1:5000/abort_request"):
        assert http_utils.job_headers(url) == header
    for url in ("http://127.0.0.1:4002/generate", "http://rm.example/http://127.0.0.1:4000", "127.0.0.1:4000", ""):
        assert http_utils.job_headers(url) == {}


def test_clients_of_plug_ins_ask_this_machine_and_the_routers_without_a_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "mine.example")
    http_utils.init_http_client(job_of(sglang_model_routers={"judge": ("[fd00::7]", 4001)}))
    for host in ("127.0.0.1:4000", "localhost:1", "[::1]:1", "[fd00::7]:4001", "mine.example"):
        assert requests.utils.get_environ_proxies(f"http://{host}/v1") == {}, host
    with httpx.Client() as client:
        transports = [client._transport_for_url(httpx.URL(url)) for url in ("http://127.0.0.1:4000", "http://[::1]:1")]
        assert all(transport is client._transport for transport in transports)
    assert requests.utils.get_environ_proxies("http://other.example")["http"] == "http://proxy.example:3128"


def test_posts_gets_and_streams_carry_the_secret_and_a_given_key_wins():
    async def conversation(url):
        http_utils.init_http_client(job_of(int(url.split(":")[2].split("/")[0])))
        await http_utils.post(url, {})
        await http_utils.get(url)
        await http_utils.post(url, {}, headers={"Authorization": "Bearer other"})
        async for _ in http_utils.post_for_events(url, {}):
            pass

    _, server = talk([(200, {})] * 3 + [(200, "")], conversation)
    assert server.keys == ["Bearer s3cret", "Bearer s3cret", "Bearer other", "Bearer s3cret"]
