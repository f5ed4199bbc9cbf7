"""The router in front of a model's engines: started here, or adopted if the user runs one."""

from __future__ import annotations

import dataclasses
import random
import time
from argparse import Namespace
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from slime.backends.sglang_utils.child_process import ChildProcess
from slime.backends.sglang_utils.server_control import Refused, ServerControl, wait_until_healthy
from slime.utils.errors import DeadlineError, EngineError
from slime.utils.net import find_available_port, format_host, format_host_port, http_url, is_loopback, loopback_address

MODULE = "slime.backends.sglang_utils.router_main"
START_TIMEOUT_S = 60.0
REGISTER_TIMEOUT_S = 60.0
UNREGISTER_TIMEOUT_S = 10.0
POLL_S = 0.1


@dataclass(frozen=True)
class RouterHandle:
    """A router's address, and its process if slime started it."""

    host: str
    """As in a URL, with IPv6 in brackets."""
    port: int
    process: ChildProcess | None = None
    metrics_port: int | None = None
    """Port of its Prometheus page, if slime started the router."""
    secret: str | None = None
    """Key that it requires from clients: the job's secret."""

    @property
    def metrics_url(self) -> str | None:
        """Its Prometheus page; None for a router that the user runs."""
        if self.metrics_port is None:
            return None
        return f"{http_url(loopback_address(), self.metrics_port)}/metrics"

    @property
    def control(self) -> ServerControl:
        return ServerControl(self.url, api_key=self.secret, name="the router")

    @property
    def url(self) -> str:
        return http_url(self.host, self.port)

    def is_alive(self) -> bool:
        """Return True while the router runs; a user's router is checked over HTTP."""
        if self.process is not None:
            return self.process.is_alive()
        return self.control.answers("/health")

    def problem(self, timeout_s: float | None) -> str | None:
        """Return the router's problem, as the end of a sentence; None if there is none.

        Args:
            timeout_s: send a request, to detect a hanging router, and wait this many seconds; None sends no request.
        """
        if self.process is not None and not self.process.is_alive():
            return "has ended"
        if timeout_s is not None and not self.control.answers("/health", timeout_s=timeout_s):
            return f"does not answer within {timeout_s:g} s (--rollout-health-check-timeout)"
        return None

    def stop(self) -> None:
        """Stop the router, unless the user runs it."""
        if self.process is not None:
            self.process.stop()


def adopt_router(host: str, port: int, *, secret: str | None = None) -> RouterHandle:
    """Return the router that the user runs at this address.

    Raises:
        EngineError: nothing answers there.
    """
    router = RouterHandle(format_host(host), port, secret=secret)
    if not router.is_alive():
        raise EngineError(
            f"no router answers at {router.url}; start it, or drop --sglang-router-ip so that slime starts one"
        )
    return router


def start_router(
    args: Namespace,
    *,
    host: str,
    port: int,
    prometheus_port: int | None = None,
    pd_disaggregation: bool = False,
    secret: str | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> RouterHandle:
    """Start sglang_router and wait until it answers; it dies with this process.

    Args:
        prometheus_port: port of its metrics; by default a free one.

    Raises:
        ProcessError: it ended or did not answer within ``timeout_s`` seconds; includes the tail of its log.
    """
    prometheus_port = prometheus_port or find_available_port(random.randint(4000, 5000))
    settings = build_router_args(
        args,
        host=host,
        port=port,
        prometheus_port=prometheus_port,
        pd_disaggregation=pd_disaggregation,
        secret=secret,
    )
    process = ChildProcess(MODULE, settings, name=f"router {format_host_port(host, port)}", extra_environment={})
    router = RouterHandle(format_host(host), port, process, prometheus_port, secret)
    server = ServerControl(router.url, name=process.name)
    try:
        wait_until_healthy(process, server, timeout_s=timeout_s, path="/health", probe_s=5.0, flag="")
    except DeadlineError:
        process.stop()
        raise
    return router


def build_router_args(
    args: Namespace,
    *,
    host: str,
    port: int,
    prometheus_port: int,
    pd_disaggregation: bool,
    secret: str | None = None,
) -> dict[str, Any]:
    """Build the fields of RouterArgs from the ``--router-*`` flags and the values that slime sets itself.

    With a secret, only the job may change the list of workers and the cache, and, if the router listens beyond
    loopback, generate.  Metrics need no key, because they are served on loopback.
    """
    from sglang_router.router_args import RouterArgs

    # Only prefixed names: the router would also read host, port and others from attributes without the prefix.
    flags = Namespace(**{k.removeprefix("router_"): v for k, v in vars(args).items() if k.startswith("router_")})
    settings = dataclasses.asdict(RouterArgs.from_cli_args(flags, use_router_prefix=False))
    settings |= {
        "host": format_host(host),  # the router joins it with the port as it is
        "port": port,
        "prometheus_port": prometheus_port,
        "prometheus_host": settings["prometheus_host"] or loopback_address(),
        "request_timeout_secs": args.sglang_router_request_timeout_secs,
        # A rollout saturates its engines on purpose; the circuit breaker would mistake slow engines for failed ones.
        "disable_circuit_breaker": True,
        # A health check that generates a token crashes an engine whose memory is released.
        "disable_health_check": True,
    }
    # Without allowed origins, any web page in a browser could send requests to the router and read the answers.
    settings["cors_allowed_origins"] = settings["cors_allowed_origins"] or [http_url(host, port)]
    if secret is not None:
        settings["control_plane_api_keys"] = [*settings["control_plane_api_keys"], ("slime", "slime", secret, "admin")]
        settings["api_key"] = None if is_loopback(host) else secret
    if pd_disaggregation:
        settings["pd_disaggregation"] = True
    return settings


def register_worker(
    router: ServerControl,
    worker_url: str,
    *,
    worker_type: str,
    bootstrap_port: int | None = None,
    worker_key: str | None = None,
    timeout_s: float = REGISTER_TIMEOUT_S,
) -> None:
    """Add an engine, and the key that it requires, to the router's list; wait until the router lists it.

    Raises:
        DeadlineError: the router does not list the engine after ``timeout_s`` seconds.
    """
    payload: dict[str, Any] = {"url": worker_url, "worker_type": worker_type}
    if worker_type == "prefill":
        payload["bootstrap_port"] = bootstrap_port
    if worker_key is not None:
        payload["api_key"] = worker_key
    router.post("/workers", payload)
    deadline = time.monotonic() + timeout_s
    while find_worker(router, worker_url) is None:
        if time.monotonic() > deadline:
            raise DeadlineError(f"{router.name} does not list the engine {worker_url} after {timeout_s:g} s")
        time.sleep(POLL_S)


def unregister_worker(router: ServerControl, worker_url: str) -> None:
    """Remove an engine from the router's list, and wait until it is gone: the router answers before it has removed it.

    Does nothing if the router does not know the engine.

    Raises:
        DeadlineError: it is still listed after ``UNREGISTER_TIMEOUT_S`` seconds.
    """
    worker = find_worker(router, worker_url, timeout_s=UNREGISTER_TIMEOUT_S)
    if worker is None:
        return
    try:
        router.delete(f"/workers/{worker['id']}", timeout_s=UNREGISTER_TIMEOUT_S)
    except Refused as refused:
        if refused.status != HTTPStatus.NOT_FOUND:  # an earlier removal is in progress
            raise
    deadline = time.monotonic() + UNREGISTER_TIMEOUT_S
    while find_worker(router, worker_url, timeout_s=UNREGISTER_TIMEOUT_S) is not None:
        if time.monotonic() > deadline:
            raise DeadlineError(f"{router.name} still lists the engine {worker_url} after {UNREGISTER_TIMEOUT_S:g} s")
        time.sleep(POLL_S)


def find_worker(
    router: ServerControl, worker_url: str, *, timeout_s: float = REGISTER_TIMEOUT_S
) -> dict[str, Any] | None:
    """Return the router's entry of an engine; None if it is not listed.

    Raises:
        EngineError: the router does not answer, or its answer is not a list of engines.
    """
    answer = router.get("/workers", timeout_s=timeout_s)
    workers = answer.get("workers") if isinstance(answer, dict) else None
    if not isinstance(workers, list):
        raise EngineError(f"{router.name} answered GET /workers with {str(answer)[:200]!r}; expected its engines")
    return next((worker for worker in workers if worker["url"] == worker_url), None)
