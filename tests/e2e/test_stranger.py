"""A stranger on the network tries every endpoint of a running job, and gets nothing beyond health.

``SLIME_HOST_IP`` makes the job listen where other hosts reach it, as a job of several nodes does.
"""

from __future__ import annotations

import base64
import os
import pickle
import re
import signal
import stat
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import torch

from slime.backends.sglang_utils import cpu_shim
from slime.utils.net import get_current_node_ip, get_free_port, is_loopback
from tests.e2e.job import STEP_S, Job, grpo_flags

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path; engines on a GPU have tests of their own"),
]

HEALTH = re.compile(r"/(health\w*|ping|liveness|readiness)/?$")
ROUTER_PATHS = (
    "/health /liveness /readiness /workers /list_workers /generate /v1/chat/completions /v1/completions /v1/responses "
    "/v1/rerank /v1/embeddings /get_loads /flush_cache /engine_metrics /metrics /v1/tokenizers /parse/function_call"
).split()
TELLS_NO_MORE = {"/v1/models": "data", "/get_server_info": "workers_count", "/server_info": "workers_count"}
"""Paths of the router that its maker left open: the model's name, the number of engines."""


class Marker:
    """What unpickling it does: make a file."""

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
    """Ask for a path by every method."""
    poison = base64.b64encode(pickle.dumps(Marker(marker))).decode()
    body = {"serialized_named_tensors": [poison], "serialized_tensors": poison, "lora_name": "x", "text": "1+1="}
    body |= {"load_format": "x", "messages": [{"role": "user", "content": "hi"}], "model": "x", "prompt": "hi"}
    answers = {}
    for method in ("GET", "POST", "PUT", "DELETE"):
        payload = None if method == "GET" else body
        answers[method] = answer_of(method, url + path, json=payload, headers=headers)
    return answers


def answer_of(method: str, url: str, **request: Any) -> requests.Response:
    """Return the answer.  A server that refuses a body unread may close before its answer is seen: ask again."""
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
    """Look for a text in a file of a job that goes on, which may put a whole file in the place of this one."""
    try:
        return text.encode() in path.read_bytes()
    except FileNotFoundError:
        return False


def test_a_stranger_gets_nothing_beyond_health_of_a_job_that_ends_when_its_trainer_dies_again(task, tmp_path):
    address, page_port, secret_file = get_current_node_ip(), get_free_port(29500), tmp_path / "secret"
    assert not is_loopback(address), "this host has no address but loopback, so that nobody else reaches it"
    flags = grpo_flags(
        task, tmp_path / "run", *"--actor-num-gpus-per-node 1 --rollout-num-gpus 1 --num-rollout 200".split(),
        *"--max-recoveries 1 --check-weight-update-equal".split(),
        *f"--prometheus-port {page_port} --job-secret-file {secret_file}".split(),
    )  # fmt: skip
    job = Job("train.py", flags, tmp_path / "log.txt", SLIME_HOST_IP=address)
    job.wait_until(lambda: "step 1/200" in job.text(), "first step", STEP_S)
    assert stat.S_IMODE(secret_file.stat().st_mode) == 0o600
    secret = secret_file.read_text().strip()
    line = re.search(r"listening, guarded by the job's secret: (.*)", job.text())
    assert line is not None
    router, engine = (re.search(rf"{who} .*?(http://\S+?:\d+)", line[1])[1] for who in ("router", "engine"))
    page = f"http://{address}:{page_port}"
    assert {url.split(":")[1].strip("/") for url in (router, engine)} == {address}

    marker, leaks, served = tmp_path / "marker", {}, engine_paths()
    ours = {int(url.rpartition(":")[2]) for url in (engine, router, page)}
    beyond = {port for host, port, _ in job.listening() if not is_loopback(host.removeprefix("::ffff:"))}
    for port in sorted(beyond - ours):  # of Ray, gloo, NCCL and SGLang's own
        try:
            answer = requests.get(f"http://{address}:{port}/", timeout=5)
        except requests.RequestException:
            continue
        assert not (answer.ok and answer.text), (port, answer.text[:200])
    # The router is one binary, which tells nobody its paths: those of its kind, and all that an engine has.
    asked = {*ROUTER_PATHS, *served} - set(TELLS_NO_MORE)
    for url, paths in ((engine, served), (router, asked), (page, ["/metrics", "/"])):
        for path in paths:
            for key in ({}, {"Authorization": "Bearer nonsense"}):
                for method, answer in ask(url, path, marker, **key).items():
                    if answer.ok and answer.text and not HEALTH.search(path):
                        leaks[f"{method} {url}{path}"] = answer.text[:200]
    assert leaks == {} and not marker.exists()
    for path, key in TELLS_NO_MORE.items():
        answer = ask(router, path, marker)["GET"]
        assert not answer.ok or set(answer.json()) <= {key, "object", "router_manager", "routers_count"}

    known = {"Authorization": f"Bearer {secret}"}
    for url, path in ((engine, "/v1/loads"), (engine, "/metrics"), (router, "/workers"), (page, "/metrics")):
        assert ask(url, path, marker, **known)["GET"].ok, path
    text = requests.get(page + "/metrics", headers=known, timeout=120).text
    assert "smg_" in text and "sglang:" in text  # what the router and the engine show is in the job's page
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path != secret_file]
    assert [path for path in files if holds(path, secret)] == []
    commands = [" ".join(psutil.Process(pid).cmdline()) for pid in job.pids()]
    assert commands and not any(secret in command for command in commands)
    engines = job.pids("slime.backends.sglang_utils.server_main")
    os.kill(job.pids("ray::MegatronTrainRayActor")[0], signal.SIGKILL)
    job.wait_until(lambda: "The trainer is back after" in job.text(), "restart of the trainer", STEP_S)
    assert job.pids("slime.backends.sglang_utils.server_main") == engines  # they stayed
    steps = job.text().count("\nstep ")
    job.wait_until(lambda: job.text().count("\nstep ") >= steps + 2, "two more steps", STEP_S)
    job.strike("ray::MegatronTrainRayActor", r"EngineDiedError: (actor rank 0 died|an actor died during training)")
