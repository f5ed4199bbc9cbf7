"""Servers of a page for people, on threads: a bounded number of clients, each with a deadline for its request."""

from __future__ import annotations

import http.server
import io
import logging
import socket
import socketserver
import threading
import time
from typing import Any

from slime.utils.http_door import own_names, refusal, with_address
from slime.utils.net import is_ipv6

logger = logging.getLogger(__name__)

MAX_CLIENTS = 32
"""Connections at a time; further ones are closed at once."""
REQUEST_S = 10.0
"""For a client to send its request, from its first byte to the last."""
ANSWER_S = 30.0
"""For a client to take each part of the answer."""


class PageServer(http.server.ThreadingHTTPServer):
    """Serves at ``host`` and ``port``; 0 takes a free one, see ``server_port``."""

    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[PageHandler]) -> None:
        self.address_family = socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
        self.own = own_names()
        self._free = threading.Semaphore(MAX_CLIENTS)
        super().__init__((host.strip("[]"), port), handler)

    def server_bind(self) -> None:
        """Bind, without the look-up of a name that ``HTTPServer`` makes."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own, if one is free."""
        if self._free.acquire(timeout=0.0):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one client."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log why a client got no answer: mostly it is gone."""
        logger.debug("%s got no answer.", client_address, exc_info=True)


class PageHandler(http.server.BaseHTTPRequestHandler):
    """Answers one request, if :mod:`slime.utils.http_door` lets it in."""

    server: PageServer

    def setup(self) -> None:
        """Read from the client until its deadline."""
        super().setup()
        self.rfile = io.BufferedReader(_Until(self.connection, time.monotonic() + REQUEST_S))

    def parse_request(self) -> bool:
        """Return True for a request that is to be answered by its method."""
        if not super().parse_request():
            return False
        own = with_address(self.server.own, self.connection.getsockname())
        refused = refusal(self.command, self.headers.items(), own, needs_json=False)
        if refused is not None:
            self.send_error(refused.status, explain=refused.reason)
        return refused is None

    def send(self, status: int, kind: str, content: bytes, *headers: tuple[str, str]) -> None:
        """Send an answer whose Content-Type is ``kind``, without its content where a client asks for the head."""
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(content))), *headers):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Print no line for each request."""


class _Until(io.RawIOBase):
    """The bytes that a client sends before ``deadline``."""

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
