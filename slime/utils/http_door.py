"""Decides which requests slime's servers accept, and serves pages to browsers.

Web pages of other sites must not send requests, even from the browser of an authorized user.  A page can send simple
requests, as text or a form, to any address that the browser reaches (detected by ``Origin`` and ``Sec-Fetch-Site``).
With DNS rebinding, it can also make the browser treat this server as the page's own (detected by ``Host``).  Programs
send no ``Origin``, and the address in their URL as ``Host``.
"""

from __future__ import annotations

import http.server
import io
import ipaddress
import json
import logging
import re
import socket
import socketserver
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from slime.utils import env
from slime.utils.net import is_ipv6, is_loopback

logger = logging.getLogger(__name__)

_ONCE = (
    "host", "origin", "authorization", "content-type", "content-length", "transfer-encoding", "sec-fetch-site",
    "sec-fetch-mode", "sec-fetch-dest",
)  # fmt: skip
"""Headers whose duplicates two programs could interpret differently."""
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{0,5})?", re.ASCII)


class Refusal(NamedTuple):
    """The answer to a refused request."""

    status: int
    reason: str


def refusal(
    method: str, headers: Iterable[tuple[str, str]], own: Collection[str], *, needs_json: bool = True
) -> Refusal | None:
    """Return why a request is refused; None if it is accepted.

    Args:
        own: names and addresses of this machine, from :func:`own_names`; loopback is always accepted.
        needs_json: refuse bodies that are not declared as JSON.
    """
    given: dict[str, list[str]] = {}
    for key, value in headers:
        given.setdefault(key.lower(), []).append(value.strip())
    if twice := [key for key in _ONCE if len(given.get(key, ())) > 1]:
        return Refusal(400, f"The header {twice[0]} is there twice; send it once.")
    found = {key: values[0] for key, values in given.items()}
    if "content-length" in found and "transfer-encoding" in found:
        return Refusal(400, "Content-Length and Transfer-Encoding are both there; send one of them.")
    if "host" not in found:
        return Refusal(400, "The request has no header Host; send the address of the URL.")
    name, host = _name_of(found["host"]), found["host"]
    origin, site = found.get("origin"), found.get("sec-fetch-site", "none")
    if name is None or not (is_loopback(name) or name in own):
        return Refusal(
            403,
            f"Host is {host[:80]!r}, which is no name of this machine; ask by its address or its host name, or start "
            "the server with the environment variable SLIME_HOST_NAMES, which holds further names.",
        )
    if origin is not None and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
        return Refusal(403, f"Origin is {origin[:80]!r}; pages of other sites may not ask this server.")
    is_link = found.get("sec-fetch-mode") == "navigate" and found.get("sec-fetch-dest") == "document"
    if site not in ("none", "same-origin") and not (is_link and method in ("GET", "HEAD")):
        return Refusal(403, f"Sec-Fetch-Site is {site[:80]!r}; pages of other sites may not ask this server.")
    has_body = found.get("content-length", "0") != "0" or "transfer-encoding" in found
    kind = found.get("content-type", "").partition(";")[0].strip().lower()
    if needs_json and has_body and method not in ("GET", "HEAD") and kind != "application/json":
        return Refusal(415, f"Content-Type is {kind[:80]!r}; it must be application/json.")
    return None


def own_names() -> frozenset[str]:
    """Return the names that clients use for this machine, including ``SLIME_HOST_IP`` and ``SLIME_HOST_NAMES``."""
    host_name = socket.gethostname()
    names = [host_name, host_name.partition(".")[0], socket.getfqdn(), env.host_ip_override(), *env.host_names()]
    return frozenset(_canonical(name) for name in names if name)


def with_address(own: frozenset[str], address: Any) -> frozenset[str]:
    """Return ``own`` plus the IP address at which a connection arrived, the first item of a socket address."""
    return own | {_canonical(str(address[0]))} if isinstance(address, tuple | list) else own


def _name_of(authority: str) -> str | None:
    match = _AUTHORITY.fullmatch(authority)
    return None if match is None else _canonical(match[1])


def _canonical(name: str) -> str:
    name = name.strip("[]").partition("%")[0].removesuffix(".").lower()
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name
    return str(getattr(address, "ipv4_mapped", None) or address)


class AsgiDoor:
    """ASGI middleware that refuses requests before they reach ``app``."""

    def __init__(self, app: Any, *, needs_json: bool = True) -> None:
        self.app = app
        self._own = own_names()
        self._needs_json = needs_json

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        refused = None if scope["type"] == "lifespan" else self.refusal(scope)
        if refused is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            text = json.dumps({"error": refused.reason}).encode()
            fields = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
            await send({"type": "http.response.start", "status": refused.status, "headers": fields})
            await send({"type": "http.response.body", "body": text})

    def refusal(self, scope: Mapping[str, Any]) -> Refusal | None:
        """Return why a request is refused; None if it is accepted."""
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        own = with_address(self._own, scope.get("server"))
        return refusal(scope.get("method", "GET"), headers, own, needs_json=self._needs_json)


# A threaded server of pages: a bounded number of clients, each with a deadline for its request

MAX_CLIENTS = 32
"""Maximum concurrent connections; further ones are closed at once."""
REQUEST_S = 10.0
"""Seconds for a client to send its whole request."""
ANSWER_S = 30.0
"""Seconds for a client to accept each part of the answer."""


class PageServer(http.server.ThreadingHTTPServer):
    """Serves on ``host`` and ``port``; port 0 picks a free one (``server_port``)."""

    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[PageHandler]) -> None:
        self.address_family = socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
        self.own = own_names()
        self._free = threading.Semaphore(MAX_CLIENTS)
        super().__init__((host.strip("[]"), port), handler)

    def server_bind(self) -> None:
        """Bind without ``HTTPServer``'s name lookup."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(timeout=0.0):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log why a client got no answer; usually it has disconnected."""
        logger.debug("%s got no answer.", client_address, exc_info=True)


class PageHandler(http.server.BaseHTTPRequestHandler):
    """Answers one request unless :func:`refusal` refuses it."""

    server: PageServer

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Until(self.connection, time.monotonic() + REQUEST_S))

    def parse_request(self) -> bool:
        """Parse and check the request; return True if its method should answer it."""
        if not super().parse_request():
            return False
        own = with_address(self.server.own, self.connection.getsockname())
        refused = refusal(self.command, self.headers.items(), own, needs_json=False)
        if refused is not None:
            self.send_error(refused.status, explain=refused.reason)
        return refused is None

    def send(self, status: int, kind: str, content: bytes, *headers: tuple[str, str]) -> None:
        """Send an answer with Content-Type ``kind``; for HEAD requests without content."""
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(content))), *headers):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Suppress the line per request."""


class _Until(io.RawIOBase):
    """Reads the bytes that a client sends, until ``deadline`` (monotonic seconds)."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self._deadline = connection, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"The client did not send its request within {REQUEST_S:.0f} s.")
        self._connection.settimeout(left_s)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(ANSWER_S)
