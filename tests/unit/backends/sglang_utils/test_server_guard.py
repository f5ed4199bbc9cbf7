"""Who may use which endpoint of an engine: every route of the installed SGLang, with each key and without."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
import uvicorn

from slime.backends.sglang_utils import cpu_shim, server_guard
from slime.backends.sglang_utils.server_guard import ServerGuard, generation_key, guard_as_parent, guard_port
from slime.utils import env

SECRET = "s3cret"
NOTHING, WRONG, GENERATES, ADMIN = b"", b"Bearer s3cre", f"Bearer {generation_key(SECRET)}".encode(), b"bearer s3cret"
HEALTH = {"/health", "/ping"}
ADMINISTRATION = [
    "/update_weights_from_tensor",
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/load_lora_adapter_from_tensors",
    "/load_lora_adapter",
    "/release_memory_occupation",
    "/abort_request",
    "/flush_cache",
    "/get_weights_by_name",
    "/configure_logging",
    "/start_profile",
    "/docs",
    "/openapi.json",
    "/an_endpoint_of_a_later_version",
]


def status(guard: ServerGuard, path: str, authorization: bytes = NOTHING, kind: str = "http"):
    """The client's result: a status, or that the request came through."""
    seen = []

    async def send(message):
        seen.append(message)

    async def receive():
        return {}

    headers = [(b"host", b"127.0.0.1:30000")] + ([(b"authorization", authorization)] if authorization else [])
    asyncio.run(guard({"type": kind, "path": path, "headers": headers}, receive, send))
    return seen[0]


async def served(scope, receive, send):
    await send("served")


def make(**options) -> ServerGuard:
    return ServerGuard(served, secret=SECRET, **options)


@pytest.fixture(scope="module")
def routes() -> list[str]:
    cpu_shim.install()
    from sglang.srt.entrypoints.http_server import app

    found = set()
    for route in app.routes:
        contexts = route.effective_route_contexts() if hasattr(route, "effective_route_contexts") else [route]
        found |= {context.path.replace("{model:path}", "m").replace("{response_id}", "1") for context in contexts}
    assert len(found) > 60 and "/load_lora_adapter_from_tensors" in found
    return sorted(found)


def test_a_stranger_gets_nothing_of_a_server_on_the_network_but_its_health(routes):
    guard = make(is_local=False)
    for key in (NOTHING, WRONG):
        assert {path for path in [*routes, "/metrics"] if status(guard, path, key) == "served"} == HEALTH & {*routes}


def test_the_secret_opens_everything(routes):
    assert all(status(make(is_local=False), path, ADMIN) == "served" for path in routes)


@pytest.mark.parametrize("path", ADMINISTRATION)
@pytest.mark.parametrize("is_local", [True, False])
def test_weights_adapters_memory_and_administration_always_need_the_secret(path, is_local):
    guard = make(is_local=is_local)
    assert all(status(guard, path, key)["status"] == 401 for key in (NOTHING, WRONG, GENERATES))


def test_generation_is_open_on_loopback_and_needs_a_key_beyond(routes):
    for path in ("/generate", "/v1/chat/completions", "/v1/models", "/v1/loads", "/model_info", "/server_info"):
        assert path in routes
        assert status(make(is_local=True), path) == "served"
        assert status(make(is_local=False), path)["status"] == 401
        assert status(make(is_local=False), path, GENERATES) == "served"


def test_metrics_are_for_this_host_and_for_the_secret():
    assert status(make(is_local=True), "/metrics/") == "served"
    assert status(make(is_local=False), "/metrics", GENERATES)["status"] == 401
    assert status(make(is_local=False), "/metrics", ADMIN) == "served"


def test_what_is_listed_exists_so_that_no_typing_error_shuts_a_door(routes):
    assert server_guard.GENERATION - {*routes} <= {"/v1/classify", "/v1/rerank"}


def test_a_websocket_is_closed_and_an_encoder_is_open_to_the_jobs_engines_alone():
    assert status(make(is_local=False), "/v1/realtime", kind="websocket") == {"type": "websocket.close", "code": 1008}
    encoder = make(is_local=False, is_encoder=True)
    for path in server_guard.FROM_ENGINES:
        assert status(encoder, path)["status"] == 401
        assert status(encoder, path, GENERATES) == "served"
        assert status(make(is_local=True, is_encoder=True), path) == "served"
    assert status(encoder, "/start_profile", GENERATES)["status"] == 401


def test_an_engine_sends_its_key_to_its_encoders_and_to_nobody_else(monkeypatch):
    sent = []

    async def request(session, method, url, **options):
        sent.append((url, options.get("headers")))

    monkeypatch.setattr(aiohttp.ClientSession, "_request", request)
    monkeypatch.setattr(uvicorn.Config, "load", uvicorn.Config.load)
    monkeypatch.setenv("SLIME_ENGINE_GUARD", json.dumps([SECRET, "10.0.0.1", 4321, False, ["http://e:1/"]]))
    guard_as_parent()
    urls = (
        "http://e:1/encode",
        "http://e:1/send",
        "http://e:1/encode/x",
        "http://e:12/encode",
        "http://o/http://e:1/send",
    )
    for url in urls:
        asyncio.run(aiohttp.ClientSession._request(None, "POST", url, headers={"A": "b"}))
    key = {"A": "b", "Authorization": f"Bearer {server_guard.generation_key(SECRET)}"}
    assert sent == [(url, key if url in urls[:2] else {"A": "b"}) for url in urls]


def test_only_the_engines_own_port_is_guarded_in_this_process_and_its_children(monkeypatch):
    monkeypatch.setattr(uvicorn.Config, "load", uvicorn.Config.load)
    monkeypatch.setenv("SLIME_ENGINE_GUARD", "")
    guard_port(SECRET, "10.0.0.1", 4321, is_encoder=False, pass_on=True)
    assert json.loads(env.get_str("SLIME_ENGINE_GUARD") or "") == [SECRET, "10.0.0.1", 4321, False, []]
    own, other = uvicorn.Config(served, port=4321), uvicorn.Config(served, port=4322)
    own.load()
    other.load()
    assert status_of_app(own) == 401 and status_of_app(other) == "served"
    monkeypatch.undo()
    monkeypatch.setattr(uvicorn.Config, "load", uvicorn.Config.load)
    monkeypatch.setenv("SLIME_ENGINE_GUARD", json.dumps([SECRET, "10.0.0.1", 4321, False, []]))
    guard_as_parent()
    child = uvicorn.Config(served, port=4321)
    child.load()
    assert status_of_app(child) == 401


def status_of_app(config: uvicorn.Config):
    seen = []

    async def send(message):
        seen.append(message)

    scope = {"type": "http", "path": "/generate", "headers": [], "client": None, "scheme": "http"}
    asyncio.run(config.loaded_app(scope, None, send))
    return seen[0]["status"] if isinstance(seen[0], dict) else seen[0]
