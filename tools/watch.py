"""Serve the report of a running run; the page reloads itself.

    slime watch RUN [--port 8123] [--host 0.0.0.0]

Listens on this machine only, unless --host says otherwise; a browser then needs the token in the printed address.
Traffic is not encrypted, so prefer a tunnel from elsewhere: ssh -L 8123:127.0.0.1:8123 HOST.
"""

from __future__ import annotations

import argparse
import hmac
import http.cookies
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.ext.record.run_reader import read_run
from slime.flags.kinds import port_number
from slime.utils.errors import ConfigError, DataError
from slime.utils.http_door import PageHandler, PageServer
from slime.utils.net import format_host_port, is_loopback
from tools.cli import clean_exit
from tools.report import encoded, fill_page, page_of
from tools.terminal import plain, say

FRESH_S = 10.0
"""A page younger than this is served again."""
PAGE_S = 120.0
"""How long to wait for a page that another request is making."""
MAX_TOKEN = 200


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="The folder of a run.")
    parser.add_argument("--port", type=port_number, default=8123, help="Where it listens.")
    parser.add_argument("--host", default="127.0.0.1", help="Address to listen on; beyond loopback with a token.")
    options = parser.parse_args(argv)
    with clean_exit():
        read_run(options.run)
    token = None if is_loopback(options.host) else secrets.token_urlsafe(24)
    with clean_exit():
        try:
            server = server_of(options.run, options.port, options.host, token)
        except OSError as error:
            where = f"--host {options.host} --port {options.port}"
            raise ConfigError(f"{where} cannot be listened on: {error.strerror}.") from error
    with server:
        name = socket.gethostname() if options.host in ("0.0.0.0", "::") else options.host
        end = f"#token={token}" if token else ""
        say(f"http://{format_host_port(name, server.server_port)}/{end} (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say()


class _Page:
    """The page of a run, made at most once per ``FRESH_S``."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._made: tuple[float, bytes] = (0.0, b"")
        self._guard = threading.Lock()

    def fresh(self) -> bytes:
        """Return the page.

        Raises:
            DataError: the run cannot be read, or another request takes too long to read it.
        """
        if not self._guard.acquire(timeout=PAGE_S):
            raise DataError(f"The page is not ready after {PAGE_S:.0f} s.")
        try:
            if time.monotonic() - self._made[0] > FRESH_S or not self._made[1]:
                page = encoded(page_of(read_run(self._run), is_live=True))
                self._made = time.monotonic(), page
            return self._made[1]
        finally:
            self._guard.release()


def server_of(run: Path, port: int, host: str = "127.0.0.1", token: str | None = None) -> PageServer:
    """Return a server of the run's page; ``token`` is the token a browser needs, None on the loopback address."""
    page = _Page(run)

    class Answer(PageHandler):
        def do_GET(self) -> None:  # noqa: N802  the name is http.server's
            if self.path != "/":
                self.send_error(404)
            elif token is not None and not self._is_known(token):
                door = fill_page("door.html", ("door.js",), (), policy="connect-src 'self'; ")
                self._send(401, door.encode())
            else:
                try:
                    self._send(200, page.fresh())
                except (DataError, OSError) as error:
                    self.send_error(503, explain=plain(str(error))[:200])

        do_HEAD = do_GET

        def do_POST(self) -> None:  # noqa: N802  the name is http.server's
            size = self.headers.get("Content-Length", "")
            if self.path != "/enter" or token is None or not re.fullmatch("[0-9]{1,3}", size) or int(size) > MAX_TOKEN:
                self.send_error(404)
            elif not hmac.compare_digest(self.rfile.read(int(size)), token.encode()):
                self.send_error(403)
            else:
                cookie = f"{self._cookie}={token}; HttpOnly; SameSite=Strict; Path=/"
                self._send(204, b"", ("Set-Cookie", cookie))

        @property
        def _cookie(self) -> str:
            return f"slime_watch_{self.server.server_port}"  # cookies know no ports

        def _is_known(self, token: str) -> bool:
            given = self.headers.get("Authorization", "").removeprefix("Bearer ")
            cookies = http.cookies.SimpleCookie(self.headers.get("Cookie", ""))
            given = given or (cookies[self._cookie].value if self._cookie in cookies else "")
            return hmac.compare_digest(given.encode(), token.encode())

        def _send(self, status: int, content: bytes, *headers: tuple[str, str]) -> None:
            guards = (("X-Frame-Options", "DENY"), ("Referrer-Policy", "no-referrer"), ("Cache-Control", "no-store"))
            self.send(status, "text/html; charset=utf-8", content, *guards, *headers)

    return PageServer(host, port, Answer)


if __name__ == "__main__":
    main()
