"""Who may use which route of the teacher server: every route, with the secret, with others and without."""

from __future__ import annotations

import asyncio
import threading
from argparse import Namespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from slime.ext.distill import server as megatron_server
from slime.ext.distill.server import MegatronServer
from slime.utils.errors import DataError

SECRET = "s3cret"
KEYS = ["", "Bearer s3cre", "s3cret"]
OPEN = {("GET", "/healthz"), ("GET", "/detect"), ("GET", "/info"), ("GET", "/get_loads"), ("POST", "/generate")}
"""Open routes, as in docs/security.md: health, and log-probs with their description."""


def make(secret: str | None) -> web.Application:
    server = MegatronServer(None, None, vocab_size=8, max_length=4, has_top=True, secret=secret, info={})
    return server.application()


def routes(app: web.Application) -> set[tuple[str, str]]:
    found = {(route.method, route.resource.canonical) for route in app.router.routes()}
    return {(method, path) for method, path in found if method != "HEAD"}


async def reached(self: Any) -> web.StreamResponse:
    return web.Response(status=418)


def statuses(app: web.Application, key: str) -> dict[tuple[str, str], int]:
    """The client's result on each route: 418 if the request came through."""

    async def ask() -> dict[tuple[str, str], int]:
        asked = sorted(routes(app)) + [("GET", "/nothing"), ("PUT", "/generate/more")]
        for route in app.router.routes():
            route._handler = reached
        found = {}
        async with TestClient(TestServer(app)) as client:
            for method, path in asked:
                answer = await client.request(method, path, headers={"Authorization": key})
                found[method, path] = answer.status
        return found

    return asyncio.run(ask())


@pytest.mark.parametrize("key", KEYS)
def test_without_the_secret_nothing_but_log_probs_and_their_description_is_reached(key):
    app = make(SECRET)
    # A future route that nobody has thought of guarding.
    app.router.add_post("/unload_model", reached)
    found = statuses(app, key)
    assert {route for route, status in found.items() if status != 401} == OPEN
    assert all(found[route] == 418 for route in OPEN)
    assert {("POST", "/update_weights_from_disk"), ("POST", "/unload_model"), ("GET", "/nothing")} <= found.keys()


@pytest.mark.parametrize("is_own_host", [True, False])
def test_a_server_without_a_secret_takes_weights_from_its_own_host_alone(is_own_host, monkeypatch):
    monkeypatch.setattr(megatron_server, "is_loopback", lambda host: is_own_host)
    found = statuses(make(None), "Bearer anything")
    assert found["POST", "/update_weights_from_disk"] == (418 if is_own_host else 401)
    assert all(found[route] == 418 for route in OPEN)


class BrokenScorer:
    """A model whose weights cannot be loaded; a load lasts until ``may_fail`` is set."""

    tokens_at_once = 8

    def __init__(self) -> None:
        self.is_loading, self.may_fail = threading.Event(), threading.Event()

    def load(self, folder: str) -> None:
        self.is_loading.set()
        self.may_fail.wait(30)
        raise DataError(f"{folder} is no checkpoint")

    def score(self, sequences: Any) -> list[Any]:
        raise AssertionError("log-probs of weights that are undefined")


def test_a_request_that_waits_behind_a_failed_load_gets_no_log_probs():
    scorer = BrokenScorer()
    config = Namespace(megatron_server_update_timeout_s=30.0)
    server = MegatronServer(scorer, config, vocab_size=8, max_length=4, has_top=True, secret=None, info={})
    worker = threading.Thread(target=server._work)
    worker.start()

    async def ask() -> tuple[int, str]:
        async with TestClient(TestServer(server.application())) as client:
            load = asyncio.create_task(client.post("/update_weights_from_disk", json={"model_path": "/new"}))
            while not scorer.is_loading.is_set():
                await asyncio.sleep(0.01)
            score = asyncio.create_task(client.post("/generate", json={"input_ids": [1, 2]}))
            while (await (await client.get("/get_loads")).json())["loads"][0]["num_waiting_reqs"] < 1:
                await asyncio.sleep(0.01)
            scorer.may_fail.set()
            assert (await load).status == 400
            answer = await score
            return answer.status, (await answer.json())["error"]["message"]

    try:
        status, message = asyncio.run(asyncio.wait_for(ask(), 60))
    finally:
        server.stop()
        worker.join(30)
    assert (status, message) == (503, "the weights of /new were not loaded: /new is no checkpoint")
