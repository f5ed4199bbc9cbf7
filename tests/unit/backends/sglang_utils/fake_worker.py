"""What the installed router asks of a worker, answered; tests look at what it was sent."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler


class FakeEngine(BaseHTTPRequestHandler):
    """Answers what the router asks of a worker, and keeps the bodies of /generate."""

    bodies: list[dict] = []
    headers_seen: list[dict] = []

    def do_GET(self):  # noqa: N802
        self._answer({"model_path": "/tiny", "tp_size": 1, "dp_size": 1, "served_model_name": "tiny"})

    def do_POST(self):  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        self.headers_seen.append(dict(self.headers))
        self._answer({"text": "x", "output_ids": [1], "meta_info": {"id": "r", "finish_reason": {"type": "stop"}}})

    def _answer(self, value):
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass
