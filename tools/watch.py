"""Serve the report of a run while it goes on, on this machine alone; the page loads itself again.

    python tools/watch.py RUN [--port 8123]

From elsewhere: ssh -L 8123:127.0.0.1:8123 HOST.
"""

from __future__ import annotations

import argparse
import http.server
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.flags.kinds import port_number
from slime.observability.run_reader import read_run
from slime.utils.errors import DataError
from tools.cli import clean_exit
from tools.report import page_of

FRESH_S = 10.0
"""A page that is younger is served again."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="The folder of a run.")
    parser.add_argument("--port", type=port_number, default=8123, help="Of the loopback address.")
    options = parser.parse_args(argv)
    with clean_exit():
        read_run(options.run)
    with server_of(options.run, options.port) as server:
        print(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def server_of(run: Path, port: int) -> http.server.HTTPServer:
    """Return a server of the run's page on the loopback address; requests wait for each other."""
    made: tuple[float, bytes] = (0.0, b"")

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802  the name is http.server's
            nonlocal made
            # Pages of other sites reach this address under a name of theirs.
            if self.headers.get("Host", "").rpartition(":")[0] not in ("127.0.0.1", "localhost"):
                self.send_error(403)
                return
            if self.path != "/":
                self.send_error(404)
                return
            if time.monotonic() - made[0] > FRESH_S or not made[1]:
                try:
                    made = time.monotonic(), page_of(read_run(run), is_live=True).encode()
                except (DataError, OSError) as error:
                    self.send_error(503, str(error)[:200])
                    return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(made[1])))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(made[1])

        def log_message(self, format: str, *args: object) -> None:
            """Print no line for each request."""

    return http.server.HTTPServer(("127.0.0.1", port), Page)


if __name__ == "__main__":
    main()
