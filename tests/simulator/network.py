"""HTTP at the client's seam: requests that take time, get lost, are doubled, refused or answered with nonsense.

A server is a simulated process without strands: it acts when a request arrives and when a timer fires.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import requests
from greenlet import getcurrent

from tests.simulator.kernel import Process


class Reply:
    """The way back to whoever asked; called with status and body, and never where the server hangs."""

    def __init__(self, answer: Callable[[int, bytes], None]) -> None:
        self._answer = answer
        self.is_awaited = True
        """Somebody waits for the answer."""
        self.was_hung_up = False
        self.on_hang_up: Callable[[], None] = lambda: None

    def __call__(self, status: int, body: bytes) -> None:
        self._answer(status, body)

    def hang_up(self) -> None:
        """Close the connection, from the other side."""
        if self.is_awaited:
            self.is_awaited, self.was_hung_up = False, True
            self.on_hang_up()


NONSENSE = (b"{}", b"[]", b"null", b'"ok"', b"7", b'{"meta_info": null}', b'[{"workers": 1}]', b'{"success": null}')
"""Bodies of another shape than the one that was asked for."""


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
        """Connections that are open; called when the process dies."""
        self._next = 0
        process.on_death.append(self._die)
        self.kernel.call_later(ready_s, self._listen)

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
        """Do something after a time, unless the process is dead then; later while it is stopped."""

        def due() -> None:
            if not self.process.is_alive:
                return
            wait_s = self.process.frozen_until_s - self.kernel.now_s
            if wait_s > 0:
                self.kernel.call_later(wait_s, due)
            else:
                work()

        self.kernel.call_later(delay_s * self.slowness, due)


def send(  # noqa: C901
    world: Any, method: str, url: str, payload: Any, done: Callable[[Any], None], *, sender: Process
) -> Callable[[], None]:
    """Send a request; ``done`` gets ``(status, body)`` or a Cut, once.

    Return a function that hangs up, as the end of the sender does.  The server is told, since SGLang and its router
    end what nobody waits for.
    """
    kernel = world.kernel
    parts = urlsplit(url)
    port, path = parts.port, parts.path + (f"?{parts.query}" if parts.query else "")
    state = {"over": False}
    tell_server: list[Callable[[], None]] = []

    def finish(outcome: Any) -> None:
        if not state["over"]:
            close()
            done(outcome)

    def hang_up() -> None:
        close()
        for tell in tell_server:
            tell()

    def close() -> None:
        state["over"] = True
        if hang_up in sender.on_death:
            sender.on_death.remove(hang_up)

    sender.on_death.append(hang_up)

    def arrive() -> None:
        server = world.servers.get(port)
        if state["over"]:
            return
        if server is None:
            finish(Cut("connection refused"))
            return
        role = world.cluster.role_of(server.process)
        cut_s = world.cluster.cut_until_s.get(role, 0.0) - kernel.now_s
        if cut_s > 0:
            kernel.call_later(cut_s, arrive)
            return
        wrong = world.at(f"http {role} {method} {parts.path}", server.process)
        if wrong == "refuse":
            finish(Cut("connection reset"))
            return
        if not server.process.is_alive:
            finish(Cut("connection reset"))
            return
        if wrong == "status":
            kernel.call_later(0.001, lambda: finish((503, b"out of order")))
            return
        number = server._next = server._next + 1
        server.waiting[number] = lambda: finish(Cut("connection reset by peer"))

        def answer(status: int, body: bytes) -> None:
            reply.is_awaited = False
            if server.waiting.pop(number, None) is None:
                return
            delay_s = kernel.draw(f"reply {role}", 0.0005, 0.01)
            outcome: Any = Cut("connection reset by peer") if wrong == "lose" else (status, body)
            if wrong == "garbage":  # it is done, and answered with half of an object
                outcome = (status, b'{"meta_info": {"finish_reason"')
            if wrong == "nonsense":
                outcome = (200, kernel.rng("nonsense").choice(NONSENSE))
            kernel.call_later(delay_s, lambda: finish(outcome))

        reply = Reply(answer)

        def closed() -> None:
            server.waiting.pop(number, None)
            reply.hang_up()

        tell_server.append(closed)

        def serve() -> None:
            server.handle(method, path, payload, reply)

        server.later(0.0, serve)
        if wrong == "double":
            nobody = Reply(lambda status, body: None)
            nobody.is_awaited = False
            server.later(0.005, lambda: server.handle(method, path, payload, nobody))

    kernel.call_later(kernel.draw(f"http {port}", 0.0005, 0.02), arrive)
    return hang_up


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
            return json.loads(self.content)
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
        world, me = self.world, getcurrent()
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
    return payload  # nobody changes what was sent


class _Exchange:
    """One request of an event loop, as the context manager that aiohttp gives."""

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
        return json.loads(self.content)

    def raise_for_status(self) -> None:
        if not self.ok:
            raise aiohttp.ClientError(f"status {self.status}")


class AsyncSession:
    """aiohttp.ClientSession."""

    world: Any = None

    def request(self, method: str, url: str, *, data: bytes | None = None, headers: Any = None) -> _Exchange:
        return _Exchange(self.world, method, url, None if data is None else json.loads(data), None)

    def get(self, url: str, headers: Any = None) -> _Exchange:
        return _Exchange(self.world, "GET", url, None, 30.0)

    def post(self, url: str, json: Any = None, headers: Any = None) -> _Exchange:
        return _Exchange(self.world, "POST", url, json, 30.0)
