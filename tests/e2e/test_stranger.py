"""A stranger on the network tries every endpoint of a running job, and gets nothing beyond health.

``SLIME_HOST_IP`` makes the job listen where other hosts reach it, as a job of several nodes does.  Both jobs end with
the death of one of their parts.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import shutil
import signal
import stat
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import torch
from safetensors.torch import load_file, save_file

from slime.backends.sglang_utils import cpu_shim
from slime.utils.net import get_current_node_ip, get_free_port, is_loopback
from tests.e2e.job import GONE_S, STEP_S, Job, grpo_flags

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
RANK_NUMBERS = ("step_s", "tok_per_s", "peak_memory_gib")


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


def listening(job: Job) -> set[tuple[str, int, str]]:
    """Every TCP socket of the job that listens: address, port, name of its process."""
    found = set()
    for pid in job.pids():
        try:
            process = psutil.Process(pid)
            name = " ".join(process.cmdline())
            sockets = process.net_connections("tcp")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        found |= {(each.laddr.ip, each.laddr.port, name) for each in sockets if each.status == psutil.CONN_LISTEN}
    return found


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
    beyond = {port for host, port, _ in listening(job) if not is_loopback(host.removeprefix("::ffff:"))}
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


EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 256 --moe-router-topk 2 --moe-router-score-function softmax "
    "--moe-router-dtype fp32 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0 --moe-grouped-gemm"
).split()
"""Flags of :func:`with_experts`."""


def with_experts(dense: Path, folder: Path) -> Path:
    """The tiny model with four experts in place of each MLP, every one of them that MLP."""
    shutil.copytree(dense, folder)
    config = json.loads((dense / "config.json").read_text())
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4}
    config |= {"num_experts_per_tok": 2, "moe_intermediate_size": config["intermediate_size"], "norm_topk_prob": True}
    config |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        layer, is_mlp, matrix = name.partition(".mlp.")
        copies = [f"{layer}.mlp.experts.{expert}.{matrix}" for expert in range(4)] if is_mlp else [name]
        weights |= {copy: tensor.clone() for copy in copies}
        if is_mlp:
            weights[f"{layer}.mlp.gate.weight"] = torch.randn(4, config["hidden_size"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def check_page(url: str) -> None:
    """Every part of the job is on its page: driver, manager, trainer ranks, experts, engines and router.

    Between two steps: an engine does not serve during a push, and a busy manager may miss a scrape.
    """
    names = (
        "perf_time_step_s", "rollout_raw_reward", "rollout_groups_kept_total", 'engines{state="serving"}',
        "train_loss", "perf_weight_push_s",
        *(f'train_expert_load_max_over_mean{{layer="{layer}"}}' for layer in (1, 2)),
        *(f'perf_rank_{name}{{rank="{rank}"}}' for name in RANK_NUMBERS for rank in (0, 1)),
    )  # fmt: skip
    deadline = time.monotonic() + GONE_S
    while True:
        page = requests.get(url, timeout=60).text
        numbers = {name: re.search(rf"^slime_{re.escape(name)} (.*)$", page, re.MULTILINE) for name in names}
        missing = [name for name, found in numbers.items() if found is None]
        successes = set(re.findall(r"^slime_scrape_success{.*} (.*)$", page, re.MULTILINE))
        if (missing == [] and successes == {"1.0"}) or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert (missing, successes) == ([], {"1.0"}), page[:4000]
    per_rank = {name: float(found[1]) for name, found in numbers.items() if found is not None and "rank=" in name}
    assert all(value > 0 for value in per_rank.values()), per_rank
    assert re.search(r'^sglang:num_running_reqs{.*engine="0"', page, re.MULTILINE)
    assert re.search(r'^smg_.*router="default"', page, re.MULTILINE)


def test_a_job_of_one_node_is_on_loopback_and_on_one_page_and_ends_with_its_router(task, tmp_path):
    page_port = get_free_port(29600)
    model = with_experts(task / "task/hf", tmp_path / "experts")
    flags = grpo_flags(
        task, tmp_path / "run", *"--actor-num-gpus-per-node 2 --rollout-num-gpus 1 --num-rollout 200".split(),
        *f"--prometheus-port {page_port} --hf-checkpoint {model} --ref-load {model}".split(), *EXPERTS,
    )  # fmt: skip
    job = Job("train.py", flags, tmp_path / "log.txt")
    job.wait_until(lambda: "step 1/200" in job.text(), "first step", STEP_S)
    sockets = listening(job)
    ours = {each for each in sockets if "slime.backends.sglang_utils" in each[2] or each[1] == page_port}
    assert len(ours) >= 4  # engine, router, its metrics, page
    assert [each for each in sockets if not is_loopback(each[0].removeprefix("::ffff:"))] == []
    environments = [(Path("/proc") / str(pid) / "environ").read_bytes() for pid in job.pids()]
    assert any(b"RAY_AUTH_TOKEN_PATH=" in each for each in environments)
    assert not any(b"RAY_AUTH_TOKEN=" in each for each in environments)
    token = Path(re.search(rb"RAY_AUTH_TOKEN_PATH=([^\0]*)", b"".join(environments))[1].decode())
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    line = re.search(r"router default (http://127\.0\.0\.1:\d+)", job.text())
    assert line is not None
    answer = requests.post(f"{line[1]}/generate", json={"text": "1+1=", "sampling_params": {}}, timeout=60)
    assert answer.ok, answer.text  # a plug-in with a client of its own
    engine = re.search(r"engine 0 .*?(http://127\.0\.0\.1:\d+)", job.text())
    assert engine is not None
    for path in ("/flush_cache", "/abort_request", "/update_weights_from_tensor", "/load_lora_adapter_from_tensors"):
        assert requests.post(engine[1] + path, json={}, timeout=60).status_code == 401
    check_page(f"http://127.0.0.1:{page_port}/metrics")
    job.strike("slime.backends.sglang_utils.router_main", r"EngineDiedError: the router http.* has ended")
