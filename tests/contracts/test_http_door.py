"""Who may use slime's servers: the rule itself, and every server over plain sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import uvicorn

from slime.agent.adapters.openai import OpenAIAdapter
from slime.backends.sglang_utils.server_guard import ServerGuard
from slime.ext.record.job_state import JobState
from slime.ext.record.prometheus_page import LoggedMetrics, MetricsPage
from slime.utils import http_door
from slime.utils.aiohttp_threaded import run_app_in_thread
from slime.utils.http_door import AsgiDoor, own_names, refusal, with_address
from slime_plugins.rollout_buffer import buffer
from tests.unit.talking_engine import make_tokenizer
from tools import watch

OWN = frozenset({"node7", "node7.cluster.example", "10.0.0.7", "fd00::7"})
JSON = {"Content-Type": "application/json", "Content-Length": "2"}


def asked(method: str = "GET", host: str | None = "127.0.0.1:8889", **more: str) -> int:
    """The status of a refusal; 200 if there is none."""
    headers = [] if host is None else [("Host", host)]
    headers += [(name.replace("_", "-"), value) for name, value in more.items()]
    refused = refusal(method, headers, OWN)
    return 200 if refused is None else refused.status


@pytest.mark.parametrize("host", "127.0.0.1:8889 LOCALHOST localhost. [::1]:8889 node7:8889 [FD00:0::7]".split())
def test_this_machine_is_asked_by_its_names_and_addresses(host):
    assert asked("POST", host, **JSON) == asked("GET", host) == 200
    assert asked("POST", host, Origin=f"http://{host}", Sec_Fetch_Site="same-origin", **JSON) == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example:8889", "127.0.0.1.evil.example", "10.0.0.8", "0.0.0.0:8889", "::1", "user@127.0.0.1"),
        *("127.0.0.1, evil.example", "127.0.0.1:8889:1", "", "2130706433", "l\u00f6calhost"),
    ],
)
def test_another_name_is_refused(host):
    assert asked("GET", host) == asked("POST", host, Origin=f"http://{host}", **JSON) == 403


def test_a_request_names_its_host_once():
    assert asked(host=None) == 400
    assert refusal("GET", [("Host", "localhost"), ("HOST", "localhost")], OWN).status == 400


def test_a_header_that_can_be_read_in_two_ways_is_refused():
    assert refusal("POST", [("Host", "localhost"), ("Origin", "0"), ("origin", "0")], OWN).status == 400
    assert asked("POST", Transfer_Encoding="chunked", **JSON) == 400


@pytest.mark.parametrize("origin", "http://evil.example null http://127.0.0.1:3000 x".split())
def test_pages_of_other_sites_are_refused_whatever_they_ask(origin):
    assert asked("GET", Origin=origin) == asked("OPTIONS", Origin=origin) == 403
    assert asked("POST", Origin=origin, **JSON) == 403


def test_other_sites_may_link_to_a_page_and_do_nothing_else():
    click = {"Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    for site in ("cross-site", "same-site"):
        assert asked("GET", Sec_Fetch_Site=site, **click) == 200
        assert asked("POST", Sec_Fetch_Site=site, **click) == 403
        assert asked("GET", Sec_Fetch_Site=site) == asked("GET", Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors") == 403
        assert asked("GET", Sec_Fetch_Site=site, **(click | {"Sec_Fetch_Dest": "iframe"})) == 403
    assert asked("GET", Sec_Fetch_Site="none", **click) == 200


def test_a_body_is_json_and_says_so():
    size = {"Content-Length": "2"}
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        assert asked("POST", Content_Type=kind, **size) == 200
    for kind in ("text/plain", "text/plain; application/json", "multipart/form-data", "application/jsonp", ""):
        assert asked("POST", Content_Type=kind, **size) == asked("PUT", Content_Type=kind, **size) == 415
    assert asked("POST", **size) == asked("POST", Transfer_Encoding="chunked") == 415
    assert asked("POST") == asked("POST", Content_Length="0") == 200
    assert refusal("POST", [("Host", "localhost"), ("Content-Length", "2")], OWN, needs_json=False) is None


def test_the_names_of_this_machine(monkeypatch):
    monkeypatch.setenv("SLIME_HOST_IP", "[FD00::8]")
    monkeypatch.setenv("SLIME_HOST_NAMES", "teacher.cluster.example 198.51.100.7")
    names = own_names()
    assert {socket.gethostname().lower(), "fd00::8", "teacher.cluster.example", "198.51.100.7"} <= names
    assert "10.0.0.9" in with_address(names, ("::ffff:10.0.0.9", 1, 0, 0))
    assert with_address(names, "/a/socket") == with_address(names, None) == names


def test_a_websocket_of_another_site_is_closed_before_it_opens():
    seen = []

    async def send(message: Any) -> None:
        seen.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send("in")

    for origin in (b"http://evil.example", b"http://localhost"):
        scope = {"type": "websocket", "path": "/", "headers": [(b"host", b"localhost"), (b"origin", origin)]}
        asyncio.run(AsgiDoor(app)(scope, None, send))
    assert seen == [{"type": "websocket.close", "code": 1008}, "in"]


# Every server


@contextmanager
def asgi(app: Any) -> Iterator[int]:
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", http=buffer.patient_protocol())
    server = uvicorn.Server(config)
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join(20)


@contextmanager
def aiohttp_server(app: Any) -> Iterator[int]:
    handle = run_app_in_thread(app, host="127.0.0.1")
    yield handle.port
    handle.stop()


@contextmanager
def page(server: http_door.PageServer) -> Iterator[int]:
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@contextmanager
def metrics() -> Iterator[int]:
    server = MetricsPage(0, LoggedMetrics(None), JobState)
    yield server.port
    server.stop()


async def engine(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


Door = tuple[Callable[[Path], Any], str, str, Any, int]
DOORS: dict[str, Door] = {
    # name -> (server, method and path, a body, the answer to programs of this machine)
    "buffer": (lambda folder: asgi(buffer.create_app()), "POST", "/buffer/write", {"a": 1}, 422),
    "start": (lambda folder: asgi(buffer.create_app()), "POST", "/start_rollout", {"task_type": "none"}, 422),
    "read": (lambda folder: asgi(buffer.create_app()), "POST", "/get_rollout_data", {}, 200),
    "adapter": (lambda folder: aiohttp_server(adapter()), "POST", "/v1/chat/completions", {"a": 1}, 400),
    "health": (lambda folder: aiohttp_server(adapter()), "GET", "/healthz", None, 200),
    "metrics": (lambda folder: metrics(), "GET", "/metrics", None, 200),
    "watch": (lambda folder: page(watch.server_of(folder, 0)), "GET", "/", None, 503),
    "token": (lambda folder: page(watch.server_of(folder, 0, token="t")), "GET", "/", None, 401),
    "engine": (
        lambda folder: asgi(ServerGuard(engine, secret="s", is_local=True)), "POST", "/generate", {"text": "a"}, 200,
    ),
}  # fmt: skip


def adapter() -> Any:
    made = OpenAIAdapter(tokenizer=make_tokenizer(), sglang_url="http://127.0.0.1:1")
    made.open_session("default")  # for requests that name no session
    return made.app


def raw(port: int, text: str) -> int:
    """The status of the answer to a verbatim request; 0 if the connection is closed without an answer."""
    with socket.create_connection(("127.0.0.1", port), 30) as client:
        client.settimeout(30)
        client.sendall(text.encode("latin-1"))
        line = client.makefile("rb").readline()
    return int(line.split()[1]) if line else 0


def of_page(method: str, path: str, body: Any, headers: str) -> str:
    text = "" if body is None else json.dumps(body)
    size = f"Content-Length: {len(text)}\r\n" if text else ""
    return f"{method} {path} HTTP/1.1\r\n{headers}{size}Connection: close\r\n\r\n{text}"


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(door[0](tmp_path_factory.mktemp("no_run"))) for name, door in DOORS.items()}


@pytest.mark.parametrize("name", DOORS)
def test_programs_of_this_machine_come_in_at_every_door(name, ports):
    check_own_programs(DOORS[name], ports[name])


def check_own_programs(door: Door, port: int) -> None:
    _, method, path, body, status = door
    url = f"http://localhost:{port}{path}"
    assert requests.request(method, url, json=body, timeout=30).status_code == status
    headers = f"Host: [::1]:{port}\r\nContent-Type: application/json\r\n"
    assert raw(port, of_page(method, path, body, headers)) == status


@pytest.mark.parametrize("name", DOORS)
def test_pages_in_a_browser_come_in_nowhere(name, ports):
    check_pages(DOORS[name], ports[name])


def check_pages(door: Door, port: int) -> None:
    _, method, path, body, own_status = door
    ours, kind = f"Host: 127.0.0.1:{port}\r\n", "Content-Type: application/json\r\n"
    refused = {
        "csrf": f"{ours}Origin: http://evil.example\r\nContent-Type: text/plain\r\n",
        "null": f"{ours}Origin: null\r\n{kind}",
        "image": f"{ours}Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\n{kind}",
        "rebinding": f"Host: evil.example:{port}\r\n{kind}",
        "no host": kind,
        "two hosts": f"{ours}Host: evil.example\r\n{kind}",
        "two lengths": f"{ours}{kind}Content-Length: 1\r\nContent-Length: 2\r\n",
        "two ways to end": f"{ours}{kind}Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
        "huge": f"{ours}{kind}X: {'x' * 200_000}\r\n",
        "many": ours + kind + "".join(f"X-{number}: 1\r\n" for number in range(20_000)),
    }
    for what, headers in refused.items():
        if body is not None or what not in ("two lengths", "two ways to end"):
            status = raw(port, of_page(method, path, None if "two " in what else body, headers))
            assert status == 0 or 400 <= status < 500, (what, status)
            assert status != own_status or status == 400, (what, status)
    preflight = f"{ours}Origin: http://evil.example\r\nAccess-Control-Request-Method: POST\r\n"
    assert raw(port, of_page("OPTIONS", path, None, preflight)) in (403, 501)


@pytest.mark.parametrize("name", ["buffer", "start", "adapter"])
def test_a_body_that_is_no_json_by_its_type_is_refused(name, ports):
    check_kind(DOORS[name], ports[name])


def check_kind(door: Door, port: int) -> None:
    _, method, path, body, _ = door
    assert raw(port, of_page(method, path, body, "Host: 127.0.0.1\r\nContent-Type: text/plain\r\n")) == 415


SLOW = (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")


def ends(port: int, begins: bytes) -> bool:
    """Whether the server closes a connection that sends one byte after another forever."""
    with socket.create_connection(("127.0.0.1", port), 30) as client:
        client.sendall(begins)
        client.settimeout(0.05)
        for _ in range(400):
            try:
                if not client.recv(4096):
                    return True
                continue
            except TimeoutError:
                pass
            except OSError:
                return True
            if begins:
                try:
                    client.sendall(b"x")
                except OSError:
                    return True
    return False


@pytest.mark.parametrize("begins", SLOW)
def test_a_client_that_does_not_finish_its_request_is_sent_away(begins, tmp_path, monkeypatch):
    monkeypatch.setattr(http_door, "REQUEST_S", 0.5)
    monkeypatch.setattr(buffer, "REQUEST_S", 0.5)
    monkeypatch.setattr("slime.utils.aiohttp_threaded.KEEPALIVE_S", 0.5)
    for name in ("buffer", "adapter", "metrics", "watch"):
        with DOORS[name][0](tmp_path) as port:
            assert ends(port, begins), name
            _, method, path, body, status = DOORS[name]
            url = f"http://127.0.0.1:{port}{path}"
            assert requests.request(method, url, json=body, timeout=30).status_code == status


def test_a_page_keeps_few_threads_for_silent_clients_and_serves_when_they_are_gone(monkeypatch):
    monkeypatch.setattr(http_door, "REQUEST_S", 1.0)
    with metrics() as port, ExitStack() as stack:
        before = threading.active_count()
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            for _ in range(http_door.MAX_CLIENTS * 3)
        ]
        for client in silent:
            client.settimeout(30)
            assert client.recv(1) == b""
            assert threading.active_count() <= before + http_door.MAX_CLIENTS
        assert raw(port, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200
