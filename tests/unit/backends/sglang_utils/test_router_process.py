"""The real router, which starts in half a second, and its settings."""

from __future__ import annotations

import socket
from argparse import Namespace

import psutil
import pytest
import requests

from slime.backends.sglang_utils.router_process import (
    adopt_router,
    build_router_args,
    find_worker,
    register_worker,
    start_router,
    unregister_worker,
)
from slime.backends.sglang_utils.server_control import ServerControl
from slime.backends.sglang_utils.sglang_engine import engine_environment
from slime.utils.errors import DeadlineError, EngineDiedError, EngineError, PortTakenError
from slime.utils.net import get_current_node_ip, get_free_port, is_loopback
from tests.scripted_engine.server import ScriptedEngine

ARGS = Namespace(sglang_router_request_timeout_secs=60, router_policy="round_robin", router_log_level="warn")


@pytest.fixture(scope="module")
def router():
    handle = start_router(
        ARGS, host="127.0.0.1", port=get_free_port(26000), prometheus_port=get_free_port(27000), timeout_s=60
    )
    yield handle
    handle.stop()


@pytest.fixture
def engine():
    with ScriptedEngine() as made:
        yield made


@pytest.mark.parametrize("server", ["port", "prometheus_port"])
def test_a_router_whose_port_was_taken_says_so(server):
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = {"port": get_free_port(26500), "prometheus_port": get_free_port(27500)}
        ports[server] = other.getsockname()[1]
        with pytest.raises(PortTakenError, match="took a port"):
            start_router(ARGS, host="127.0.0.1", timeout_s=60, **ports)


def test_another_server_at_the_port_is_not_taken_for_the_router(engine):
    assert requests.get(f"{engine.url}/health", timeout=10).ok
    with pytest.raises(PortTakenError, match="took a port"):
        start_router(ARGS, host="127.0.0.1", port=engine.port, prometheus_port=get_free_port(27500), timeout_s=60)


def test_prefixed_flags_reach_the_router_and_slime_decides_above_them():
    args = Namespace(**vars(ARGS), router_host="9.9.9.9", router_balance_abs_threshold=10, policy="random", host="bad")
    built = build_router_args(args, host="[::1]", port=1, prometheus_port=2, pd_disaggregation=True)
    expected = {
        "policy": "round_robin",
        "host": "[::1]",
        "port": 1,
        "prometheus_port": 2,
        "request_timeout_secs": 60,
        "balance_abs_threshold": 10,
        "pd_disaggregation": True,
        "disable_circuit_breaker": True,
        "disable_health_check": True,
    }
    assert {name: built[name] for name in expected} == expected


def test_an_engine_is_listed_after_registration_and_gone_after_removal(router, engine):
    control = ServerControl(router.url)
    register_worker(control, engine.url, worker_type="regular")
    assert find_worker(control, engine.url)["worker_type"] == "regular"
    unregister_worker(control, engine.url)
    unregister_worker(control, engine.url)


class Half(ScriptedEngine):
    """A prefill or decode engine that hangs up on an idle connection just when a request comes."""

    keep_alive_s = float(engine_environment(tp_size=1)["SGLANG_TIMEOUT_KEEP_ALIVE"])
    idle_s = 0.0
    """Seconds since the last answer on any connection."""

    async def _generate(self, web_request):
        if self.idle_s >= self.keep_alive_s:
            web_request.transport.abort()
        return await super()._generate(web_request)


def test_a_request_after_a_pause_reaches_both_halves_of_a_pair():
    """The router reuses idle connections for 90 s; if the prefill half is lost, the decode engine keeps waiting."""
    ports = {"port": get_free_port(26700), "prometheus_port": get_free_port(27700)}
    handle = start_router(ARGS, host="127.0.0.1", pd_disaggregation=True, **ports)
    with Half() as prefill, Half() as decode:
        register_worker(handle.control, prefill.url, worker_type="prefill", timeout_s=20, bootstrap_port=1)
        register_worker(handle.control, decode.url, worker_type="decode", timeout_s=20)
        for idle_s in (0.0, 5.0, 89.0):
            prefill.idle_s = idle_s
            assert handle.control.post("/generate", {"text": "a"})["text"]
        prefilled, decoded = ([body["bootstrap_room"] for body in half.payloads] for half in (prefill, decode))
        assert len(set(decoded)) == 3 and sorted(prefilled) == sorted(decoded)
        handle.stop()


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_a_router_reaches_its_engines_whatever_proxy_the_environment_names(monkeypatch, engine, name):
    for other in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    ports = {"port": get_free_port(26600), "prometheus_port": get_free_port(27600)}
    handle = start_router(ARGS, host="127.0.0.1", **ports)
    register_worker(handle.control, engine.url, worker_type="regular", timeout_s=20)
    assert handle.control.post("/generate", {"text": "a"})["text"]
    assert ServerControl(handle.metrics_url.removesuffix("/metrics")).answers("/metrics")
    handle.stop()


def test_an_engine_that_answers_nothing_is_never_listed(router):
    dead = f"http://127.0.0.1:{get_free_port(28000)}"
    with pytest.raises(DeadlineError, match="does not list the engine"):
        register_worker(ServerControl(router.url), dead, worker_type="regular", timeout_s=1.0)


def test_a_router_of_the_user_is_adopted_and_not_stopped(router):
    adopted = adopt_router("127.0.0.1", router.port)
    adopted.stop()
    assert router.is_alive()


def test_no_router_at_the_given_address_is_an_error():
    with pytest.raises(EngineError, match="--sglang-router-ip"):
        adopt_router("127.0.0.1", get_free_port(28500))


def test_a_taken_port_ends_the_start_with_the_routers_log(router):
    with pytest.raises(EngineDiedError, match="end of .*router"):
        start_router(
            ARGS, host="127.0.0.1", port=get_free_port(26100), prometheus_port=router.port, timeout_s=120
        ).stop()


@pytest.fixture(scope="module", params=["loopback", "network"])
def guarded(request):
    host = "127.0.0.1" if request.param == "loopback" else get_current_node_ip()
    handle = start_router(
        ARGS, host=host, port=get_free_port(26400), prometheus_port=get_free_port(27400), secret="s3cret"
    )
    yield handle
    handle.stop()


def test_a_guarded_router_takes_workers_and_generation_from_its_job_alone(guarded, engine):
    register_worker(guarded.control, engine.url, worker_type="regular", worker_key="g3nerates")
    is_local = is_loopback(guarded.host)
    for key, may_administer, may_generate in (
        ({}, False, is_local),
        ({"Authorization": "Bearer wrong"}, False, is_local),
        ({"Authorization": "Bearer s3cret"}, True, True),
    ):
        for method, path in (("GET", "/workers"), ("POST", "/flush_cache"), ("GET", "/get_loads")):
            assert requests.request(method, guarded.url + path, headers=key, timeout=10).ok == may_administer
        if not may_administer:  # an added engine would get prompts
            lure = requests.post(guarded.url + "/workers", json={"url": "http://127.0.0.1:1"}, headers=key, timeout=10)
            assert lure.status_code == 401
        answer = requests.post(guarded.url + "/generate", json={"text": "a"}, headers=key, timeout=10)
        assert answer.ok == may_generate
    assert {headers["Authorization"] for headers in engine.headers} == {"Bearer g3nerates"}
    unregister_worker(guarded.control, engine.url)


def test_the_metrics_of_a_router_are_on_loopback(guarded):
    assert guarded.metrics_url.startswith("http://127.0.0.1:") and requests.get(guarded.metrics_url, timeout=10).ok
    [router] = psutil.Process(guarded.process.pid).children(recursive=True)
    open_to = {each.laddr.ip for each in router.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    assert open_to == {"127.0.0.1", guarded.host}


def test_a_page_of_another_site_gets_no_leave_to_ask_the_router_and_no_answer_without(guarded):
    asks = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    for origin, allowed in (("http://evil.example", None), ("null", None), (guarded.url, guarded.url)):
        leave = requests.options(guarded.url + "/generate", headers=asks | {"Origin": origin}, timeout=10)
        assert leave.headers.get("Access-Control-Allow-Origin") == allowed
    key = {"Authorization": "Bearer s3cret"}
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        answer = requests.post(
            guarded.url + "/generate", data='{"text": "a"}', headers=key | {"Content-Type": kind}, timeout=10
        )
        assert answer.status_code == 415
