"""An application in its own thread: it listens when the call returns, stops, and reports why it cannot start."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest
from aiohttp import web

from slime.utils.aiohttp_threaded import run_app_in_thread
from slime.utils.errors import DeadlineError, ProcessError


def make_app():
    async def hello(request):
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/", hello)
    return app


def test_it_listens_when_the_call_returns_and_not_after_its_stop():
    handle = run_app_in_thread(make_app(), host="127.0.0.1", thread_name="test-app")
    assert handle.thread.name == "test-app"
    assert httpx.get(f"http://127.0.0.1:{handle.port}/").text == "hello"
    handle.stop()
    handle.stop()
    assert not handle.thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{handle.port}/")


def test_a_taken_port_is_an_error_with_its_cause():
    handle = run_app_in_thread(make_app(), host="127.0.0.1")
    with pytest.raises(ProcessError, match=str(handle.port)) as refused:
        run_app_in_thread(make_app(), host="127.0.0.1", port=handle.port)
    assert isinstance(refused.value.__cause__, OSError)
    handle.stop()


def test_a_start_that_hangs_ends_at_its_deadline():
    app = make_app()
    app.on_startup.append(lambda app: asyncio.sleep(60))
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="within 0 s"):
        run_app_in_thread(app, host="127.0.0.1", start_timeout_sec=0.3)
    assert time.monotonic() - began < 30
