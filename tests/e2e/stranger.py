"""Checks that a stranger on the network gets nothing beyond health from any endpoint of a running job."""

from __future__ import annotations

import base64
import pickle
import re
import stat
import time
from pathlib import Path
from typing import Any

import psutil
import requests

from slime.backends.sglang_utils import cpu_shim
from slime.utils.net import is_loopback
from tests.e2e.job import Job

HEALTH = re.compile(r"/(health\w*|ping|liveness|readiness)/?$")
ROUTER_PATHS = (
    "/health /liveness /readiness /workers /list_workers /generate /v1/chat/completions /v1/completions /v1/responses "
    "/v1/rerank /v1/embeddings /get_loads /flush_cache /engine_metrics /metrics /v1/tokenizers /parse/function_call"
).split()
TELLS_NO_MORE = {"/v1/models": "data", "/get_server_info": "workers_count", "/server_info": "workers_count"}
"""Paths that the router leaves open: the model's name, the number of engines."""


class Marker:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def engine_paths() -> set[str]:
    cpu_shim.install()
    from sglang.srt.entrypoints.http_server import app

    found = {"/metrics"}
    for route in app.routes:
        contexts = route.effective_route_contexts() if hasattr(route, "effective_route_contexts") else [route]
        found |= {re.sub(r"{.*?}", "x", context.path) for context in contexts}
    return found


def ask(url: str, path: str, marker: Path, **headers: str) -> dict[str, requests.Response]:
    poison = base64.b64encode(pickle.dumps(Marker(marker))).decode()
    body = {"serialized_named_tensors": [poison], "serialized_tensors": poison, "lora_name": "x", "text": "1+1="}
    body |= {"load_format": "x", "messages": [{"role": "user", "content": "hi"}], "model": "x", "prompt": "hi"}
    answers = {}
    for method in ("GET", "POST", "PUT", "DELETE"):
        payload = None if method == "GET" else body
        answers[method] = answer_of(method, url + path, json=payload, headers=headers)
    return answers


def answer_of(method: str, url: str, **request: Any) -> requests.Response:
    """Return the answer.  A server that refuses an unread body may close before its answer is seen: ask again."""
    for attempt in range(4):
        try:
            with requests.Session() as session:
                session.trust_env = False
                return session.request(method, url, timeout=120, **request)
        except requests.ConnectionError:
            if attempt == 3:
                raise
            time.sleep(0.2)
    raise AssertionError


def holds(path: Path, text: str) -> bool:
    """Search a file of a running job for a text; the job may replace the whole file meanwhile."""
    try:
        return text.encode() in path.read_bytes()
    except FileNotFoundError:
        return False


def check_a_stranger_gets_nothing(job: Job, folder: Path, address: str, page_port: int, secret_file: Path) -> None:
    """Try every endpoint of a job that listens at ``address``, without its secret and with it.

    Args:
        job: a job with a router, an engine, and a page at ``page_port``.
        folder: folder of all files of the job.
        address: an address other than loopback.
        page_port: value of ``--prometheus-port``.
        secret_file: value of ``--job-secret-file``.
    """
    assert stat.S_IMODE(secret_file.stat().st_mode) == 0o600
    secret = secret_file.read_text().strip()
    line = re.search(r"Listening, guarded by the job's secret: (.*)", job.text())
    assert line is not None
    router, engine = (re.search(rf"{who} .*?(http://\S+?:\d+)", line[1])[1] for who in ("router", "engine"))
    page = f"http://{address}:{page_port}"
    assert {url.split(":")[1].strip("/") for url in (router, engine)} == {address}

    marker, leaks, served = folder / "marker", {}, engine_paths()
    ours = {int(url.rpartition(":")[2]) for url in (engine, router, page)}
    beyond = {port for host, port, _ in job.listening() if not is_loopback(host.removeprefix("::ffff:"))}
    for port in sorted(beyond - ours):  # of Ray, gloo, NCCL and SGLang
        try:
            answer = requests.get(f"http://{address}:{port}/", timeout=5)
        except requests.RequestException:
            continue
        assert not (answer.ok and answer.text), (port, answer.text[:200])
    # The router is one binary with unknown paths: try those of its kind, and all of an engine.
    asked = {*ROUTER_PATHS, *served} - set(TELLS_NO_MORE)
    for url, paths in ((engine, served), (router, asked), (page, ["/metrics", "/"])):
        for path in paths:
            for key in ({}, {"Authorization": "Bearer nonsense"}):
                for method, answer in ask(url, path, marker, **key).items():
                    if answer.ok and answer.text and not HEALTH.search(path):
                        leaks[f"{method} {url}{path}"] = answer.text[:200]
    assert leaks == {}, leaks
    assert not marker.exists()
    assert ask(engine, "/health_generate", marker)["GET"].status_code == 401  # the router's version queries no engine
    for path, key in TELLS_NO_MORE.items():
        answer = ask(router, path, marker)["GET"]
        assert not answer.ok or set(answer.json()) <= {key, "object", "router_manager", "routers_count"}

    known = {"Authorization": f"Bearer {secret}"}
    for url, path in ((engine, "/v1/loads"), (engine, "/metrics"), (router, "/workers"), (page, "/metrics")):
        assert ask(url, path, marker, **known)["GET"].ok, path
    text = requests.get(page + "/metrics", headers=known, timeout=120).text
    assert "smg_" in text and "sglang:" in text  # the job's page includes the router's and the engine's
    files = [path for path in folder.rglob("*") if path.is_file() and path != secret_file]
    assert [path for path in files if holds(path, secret)] == []
    commands = [" ".join(psutil.Process(pid).cmdline()) for pid in job.pids()]
    assert commands and not any(secret in command for command in commands)
