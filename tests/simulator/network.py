"""HTTP at the client's seam: requests take time, get lost, are duplicated, refused or answered with nonsense.

A server is a simulated process without strands: it acts when a request arrives and when a timer fires.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import requests

from tests.simulator.kernel import Process


class Reply:
    """The way back to the caller; called with status and body, or never if the server hangs."""

    def __init__(self, answer: Callable[[int, bytes], None]) -> None:
        self._answer = answer
        self.is_awaited = True
        """Somebody waits for the answer."""
        self.was_hung_up = False
        self.on_hang_up: Callable[[], None] = lambda: None

    def __call__(self, status: int, body: bytes) -> None:
        self._answer(status, body)

    def hang_up(self) -> None:
        if self.is_awaited:
            self.is_awaited, self.was_hung_up = False, True
            self.on_hang_up()


NONSENSE = (b"{}", b"[]", b"null", b'"ok"', b"7", b'{"meta_info": null}', b'[{"workers": 1}]', b'{"success": null}')
"""Bodies of another shape than requested."""


class Cut(Exception):
    """The connection was refused or broke."""


class Server:
    """Something that listens."""

    kind = "server"

    def __init__(self, world: Any, process: Process, port: int, *, ready_s: float) -> None:
        self.world, self.kernel, self.process, self.port = world, world.kernel, process, port
        self.url = f"http://127.0.0.1:{port}"
        self.slowness = 1.0
        self.waiting: dict[int, Callable[[], None]] = {}
        """Open connections; called when the process dies."""
        self._next = 0
        process.on_death[self._die] = None
        self.kernel.call_later(ready_s, self._listen)

    def next_number(self) -> int:
        self._next += 1
        return self._next

    def _listen(self) -> None:
        if self.process.is_alive:
            self.world.servers[self.port] = self

    def _die(self) -> None:
        if self.world.servers.get(self.port) is self:
            del self.world.servers[self.port]
        broken, self.waiting = list(self.waiting.values()), {}
        for tell in broken:
            self.kernel.call_later(self.kernel.draw(f"break {self.kind}", 0.001, 0.5), tell)

    def handle(self, method: str, path: str, payload: Any, reply: Reply) -> None:
        raise NotImplementedError

    def later(self, delay_s: float, work: Callable[[], None]) -> None:
        """Do something after a time, unless the process is dead then; later if it is stopped."""
        self.kernel.call_later(delay_s * self.slowness, lambda: self._do(work))

    def _do(self, work: Callable[[], None]) -> None:
        if not self.process.is_alive:
            return
        wait_s = self.process.frozen_until_s - self.kernel.now_s
        if wait_s > 0:
            self.kernel.call_later(wait_s, lambda: self._do(work))
        else:
            work()


class Exchange:
    """A request and its answer: ``done`` gets ``(status, body)`` or a Cut, once.

    Nothing in it refers to itself once it is finished, so it needs no garbage collection.
    """

    __slots__ = (
        "_done", "_is_over", "_kernel", "_method", "_number", "_path", "_payload", "_port", "_reply", "_role",
        "_sender", "_server", "_world", "_wrong",
    )  # fmt: skip

    def __init__(
        self, world: Any, method: str, url: str, payload: Any, done: Callable[[Any], None], sender: Process
    ) -> None:
        self._world, self._kernel, self._method, self._payload = world, world.kernel, method, payload
        self._port, self._path = split_url(url)
        self._done, self._sender, self._is_over = done, sender, False
        self._server: Server | None = None
        self._reply: Reply | None = None
        self._number, self._role, self._wrong = 0, "", None
        sender.on_death[self.hang_up] = None
        self._kernel.call_later(self._kernel.draw(f"http {self._port}", 0.0005, 0.02), self._arrive)

    def hang_up(self) -> None:
        """Close the connection, as when the sender ends; the server is notified."""
        self._close()
        server, reply, self._server, self._reply = self._server, self._reply, None, None
        if server is not None and reply is not None:
            server.waiting.pop(self._number, None)
            reply.hang_up()

    def _close(self) -> None:
        self._is_over = True
        self._sender.on_death.pop(self.hang_up, None)

    def _finish(self, outcome: Any) -> None:
        if not self._is_over:
            self._close()
            self._server = self._reply = None
            self._done(outcome)

    def _break(self) -> None:
        self._finish(Cut("connection reset by peer"))

    def _arrive(self) -> None:
        world, kernel, server = self._world, self._kernel, self._world.servers.get(self._port)
        if self._is_over:
            return
        if server is None:
            self._finish(Cut("connection refused"))
            return
        role = self._role = world.cluster.role_of(server.process)
        cut_s = world.cluster.cut_until_s.get(role, 0.0) - kernel.now_s
        if cut_s > 0:
            kernel.call_later(cut_s, self._arrive)
            return
        wrong = self._wrong = world.at(f"http {role} {self._method} {self._path.partition('?')[0]}", server.process)
        if wrong == "refuse" or not server.process.is_alive:
            self._finish(Cut("connection reset"))
            return
        if wrong == "status":
            kernel.call_later(0.001, lambda: self._finish((503, b"out of order")))
            return
        self._server, self._number = server, server.next_number()
        server.waiting[self._number] = self._break
        self._reply = Reply(self._answer)
        self._serve_by(server, self._reply, 0.0)
        if wrong == "double":
            nobody = Reply(lambda status, body: None)
            nobody.is_awaited = False
            self._serve_by(server, nobody, 0.005)

    def _serve_by(self, server: Server, reply: Reply, delay_s: float) -> None:
        server.later(delay_s, lambda: server.handle(self._method, self._path, self._payload, reply))

    def _answer(self, status: int, body: bytes) -> None:
        server, reply, kernel = self._server, self._reply, self._kernel
        if server is None or reply is None:
            return
        self._server = self._reply = None
        reply.is_awaited = False
        if server.waiting.pop(self._number, None) is None:
            return
        delay_s = kernel.draw(f"reply {self._role}", 0.0005, 0.01)
        outcome: Any = Cut("connection reset by peer") if self._wrong == "lose" else (status, body)
        if self._wrong == "garbage":  # it is processed, and answered with half of an object
            outcome = (status, b'{"meta_info": {"finish_reason"')
        if self._wrong == "nonsense":
            outcome = (200, kernel.rng("nonsense").choice(NONSENSE))
        kernel.call_later(delay_s, lambda: self._finish(outcome))


@functools.lru_cache(maxsize=4096)
def split_url(url: str) -> tuple[int | None, str]:
    parts = urlsplit(url)
    return parts.port, parts.path + (f"?{parts.query}" if parts.query else "")


def send(
    world: Any, method: str, url: str, payload: Any, done: Callable[[Any], None], *, sender: Process
) -> Callable[[], None]:
    """Send a request; ``done`` gets ``(status, body)`` or a Cut, once.

    Return a function that hangs up, as when the sender ends.  The server is notified, because SGLang and its router
    end requests that nobody waits for.
    """
    return Exchange(world, method, url, payload, done, sender).hang_up


# Clients


class _Response:
    def __init__(self, status: int, body: bytes) -> None:
        self.status_code = self.status = status
        self.ok = status < 400
        self.content = body

    @property
    def text(self) -> str:
        return self.content.decode()

    def json(self) -> Any:
        try:
            return orjson.loads(self.content)
        except json.JSONDecodeError as error:
            raise requests.JSONDecodeError(error.msg, error.doc, error.pos) from error


class SyncSession:
    """requests.Session."""

    world: Any = None
    trust_env = True

    def __enter__(self) -> SyncSession:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def request(self, method: str, url: str, *, json: Any = None, timeout: Any = None, **_: Any) -> _Response:
        world, me = self.world, self.world.kernel.current
        outcome: list[Any] = []

        def done(result: Any) -> None:
            outcome.append(result)
            world.kernel.wake(me)

        hang_up = send(world, method, url, _travel(json), done, sender=me.process)
        world.kernel.park(timeout[1], f"{method} {url}")
        if not outcome:
            hang_up()
            raise requests.ReadTimeout(f"no answer within {timeout[1]} s")
        if isinstance(outcome[0], Cut):
            raise requests.ConnectionError(str(outcome[0]))
        return _Response(*outcome[0])


def _travel(payload: Any) -> Any:
    return payload  # nobody changes a sent object


class _Exchange:
    """One request of an event loop, as aiohttp's context manager."""

    def __init__(self, world: Any, method: str, url: str, payload: Any, timeout_s: float | None) -> None:
        self._world, self._method, self._url, self._payload = world, method, url, payload
        self._timeout_s = timeout_s
        self._hang_up: Callable[[], None] = lambda: None

    async def __aenter__(self) -> _AsyncResponse:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def done(result: Any) -> None:
            loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(result))

        sender = self._world.kernel.current_process
        self._hang_up = send(self._world, self._method, self._url, self._payload, done, sender=sender)
        try:
            result = await asyncio.wait_for(future, self._timeout_s)
        except BaseException:
            self._hang_up()
            raise
        if isinstance(result, Cut):
            raise aiohttp.ServerDisconnectedError(str(result))
        return _AsyncResponse(*result)

    async def __aexit__(self, *_: object) -> None:
        self._hang_up()


class _AsyncResponse(_Response):
    async def read(self) -> bytes:
        return self.content

    async def json(self, **_: Any) -> Any:  # type: ignore[override]
        return orjson.loads(self.content)

    def raise_for_status(self) -> None:
        if not self.ok:
            raise aiohttp.ClientError(f"status {self.status}")


class AsyncSession:
    """aiohttp.ClientSession."""

    world: Any = None

    def request(self, method: str, url: str, *, data: bytes | None = None, headers: Any = None) -> _Exchange:
        return _Exchange(self.world, method, url, None if data is None else orjson.loads(data), None)

    def get(self, url: str, headers: Any = None) -> _Exchange:
        return _Exchange(self.world, "GET", url, None, 30.0)

    def post(self, url: str, json: Any = None, headers: Any = None) -> _Exchange:
        return _Exchange(self.world, "POST", url, json, 30.0)
