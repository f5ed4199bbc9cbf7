"""Starts the models of a run, each with its router and its groups of engines.

The layout comes from ``--sglang-config`` or ``--prefill-num-servers``; by default it is one group of regular engines.
"""

from __future__ import annotations

import logging
import random
import threading
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from slime.backends.megatron_utils.models import dtype_of_fp32
from slime.backends.sglang_utils.router_process import (
    RouterHandle,
    adopt_router,
    find_worker,
    register_worker,
    start_router,
)
from slime.backends.sglang_utils.server_guard import generation_key
from slime.backends.sglang_utils.sglang_config import (
    ModelConfig,
    ServerGroupConfig,
    own_dtype,
    resolve_sglang_config,
    served_dtype,
    trainer_dtype,
)
from slime.flags.cluster import plan_gpus
from slime.flags.parse import record_runtime
from slime.flags.security import Trust
from slime.ray.engines.actor import PortCursors
from slime.ray.engines.deadlines import MAX_START_ATTEMPTS, start_timeout_s
from slime.ray.engines.group import EngineGroup
from slime.ray.engines.lifecycle import LIVE, EngineEvent
from slime.ray.gpus import GpuSlice
from slime.ray.utils import listen_address
from slime.ray.waiting import wait_for
from slime.utils.errors import ConfigError, PortTakenError, ProcessError
from slime.utils.http_utils import find_available_port
from slime.utils.net import is_port_available

logger = logging.getLogger(__name__)


@dataclass
class RolloutServer:
    """One model: its router and its groups of engines."""

    config: ModelConfig
    router: RouterHandle | None
    groups: list[EngineGroup]
    start_router_at: Callable[..., RouterHandle] | None = None
    """Starts the router at a host and port; None if the user runs the router."""

    def __post_init__(self) -> None:
        self._reviving = threading.Lock()

    @property
    def has_live_engine(self) -> bool:
        """True if at least one engine's server is up."""
        return any(group.indices(*LIVE) for group in self.groups)

    def listens_at(self) -> list[str]:
        """Return one line per server of the model: its name and address."""
        lines = []
        if self.router is not None:
            lines.append(f"router {self.config.name} {self.router.url}, its metrics {self.router.metrics_url}")
        for group in self.groups:
            lines += [f"{group.name_of(index)} {url}" for index, url in enumerate(group.urls) if url is not None]
        return lines

    @property
    def has_own_router(self) -> bool:
        """True if slime started the router and so may restart it."""
        return self.router is not None and self.router.process is not None

    def router_problem(self, timeout_s: float | None) -> str | None:
        """Describe what keeps the router from working, or return None; see ``RouterHandle.problem``."""
        if self.router is None or (problem := self.router.problem(timeout_s)) is None:
            return None
        return f"the router {self.router.url} of model {self.config.name!r} {problem}"

    def revive_router(self, timeout_s: float | None) -> None:
        """Restart the router if it does not work; a router that the user runs is left alone.

        Raises:
            ProcessError: see :meth:`restart_router`.
        """
        with self._reviving:
            if self.has_own_router and (problem := self.router_problem(timeout_s)):
                logger.error("%s: restarting it", problem)
                self.restart_router()

    def restart_router(self) -> None:
        """Restart the router at its old address, so that known URLs stay valid, and register its engines.

        Raises:
            ProcessError: it did not start, or did not accept an engine, in ``MAX_START_ATTEMPTS`` attempts.
        """
        assert self.router is not None and self.start_router_at is not None
        host, port = self.router.host.strip("[]"), self.router.port
        for attempt in range(1, MAX_START_ATTEMPTS + 1):
            self.router.stop()
            try:
                self.router = self.start_router_at(host=host, port=port)
                self._register_engines(self.router)
                return
            except ProcessError as error:
                if attempt == MAX_START_ATTEMPTS:
                    raise
                logger.warning("The router %s failed again (attempt %d): %s", self.router.url, attempt, error)

    def _register_engines(self, router: RouterHandle) -> None:
        for group in self.groups:
            group.router = router
            for index, url in enumerate(group.urls):
                if (
                    url is not None
                    and group.is_listed[index]
                    and group.config.worker_type != "encoder"
                    and find_worker(router.control, url) is None
                ):
                    register_worker(
                        router.control,
                        url,
                        worker_type=group.config.worker_type,
                        bootstrap_port=group.bootstrap_ports[index],
                        worker_key=group.worker_key,
                    )


def start_rollout_servers(args: Namespace, gpus: GpuSlice) -> list[RolloutServer]:
    """Start routers and engines without waiting for them (except encoders); see :func:`wait_until_serving`."""
    cursors = PortCursors()
    servers: list[RolloutServer] = []
    gpu_offset = rank_offset = 0
    layout, secret = resolve_sglang_config(args), Trust.of(args).job_secret
    num_shared = 0  # how many of the first engine GPUs the trainer uses too
    if args.offload_rollout:
        num_shared = args.actor_num_nodes * args.actor_num_gpus_per_node - plan_gpus(args).rollout_offset
    if args.sglang_config is not None:
        # Requests go to the first model, so other models' GPUs and unused GPUs do not add to its concurrency.
        record_runtime(args, rollout_num_engines=layout.models[0].num_engines)
    for index, model in enumerate(layout.models):
        server = server_of(args, model, is_first=index == 0)
        for config in model.server_groups:
            if gpu_offset + config.num_gpus > len(gpus.bundle_indices):
                raise ConfigError(
                    f"server group {config.worker_type!r} of model {model.name!r} needs GPUs up to "
                    f"{gpu_offset + config.num_gpus}, but the engines have {len(gpus.bundle_indices)}. Set "
                    "--rollout-num-gpus or the group's num_gpus."
                )
            group = EngineGroup(
                args=args,
                gpus=gpus,
                model=model,
                config=config,
                gpu_offset=gpu_offset,
                rank_offset=rank_offset,
                router=server.router,
                needs_offload=config.worker_type != "encoder" and gpu_offset < num_shared,
                cursors=cursors,
                restarts=args.use_fault_tolerance,
                revive_router=partial(server.revive_router, args.rollout_health_check_timeout),
                dtype=_dtype_of(config, model.model_path, trainer_dtype(args)),
                weight_loaders=tuple(args.weight_loaders),
                worker_key=None if secret is None else generation_key(secret),
            )
            server.groups.append(group)
            gpu_offset += config.num_gpus
            rank_offset += len(group.all_engines)
        _start_groups(server.groups, start_timeout_s(args.engine_start_timeout_s))
        servers.append(server)
    return servers


def _start_groups(groups: list[EngineGroup], timeout_s: float) -> None:
    """Start a model's groups; encoders first, because the others need their addresses."""
    encoders = [group for group in groups if group.config.worker_type == "encoder"]
    if encoders:
        for group in encoders:
            group.start()
        wait_until_serving(encoders, timeout_s)
        urls = [url for group in encoders for url in group.urls if url is not None]
        for group in groups:
            if group.config.worker_type in ("prefill", "regular"):
                group.extra_overrides = {"language_only": True, "encoder_urls": urls}
    for group in groups:
        if group not in encoders:
            group.start()


def wait_until_serving(groups: Sequence[EngineGroup], timeout_s: float) -> None:
    """Wait until every starting engine serves, and report that to its group.

    An engine whose port was taken by another process restarts with other ports.  Engines enforce their own deadline;
    ``timeout_s`` only catches an actor that never ran.

    Raises:
        ProcessError: an engine or a router ended, an engine did not answer within ``--engine-start-timeout-s``, or
            ports were taken in all ``MAX_START_ATTEMPTS`` attempts.
    """

    def check_others() -> None:
        for group in groups:
            group.raise_if_startup_failed()

    for attempt in range(1, MAX_START_ATTEMPTS + 1):
        starting = [ref for group in groups for refs in group.starting.values() for ref in refs]
        try:
            what = "the SGLang engines to start"
            wait_for(starting, what=what, timeout_s=timeout_s, meanwhile=check_others)
            break
        except PortTakenError:
            if attempt == MAX_START_ATTEMPTS:
                raise
            for group in groups:
                group.start()
    for group in groups:
        for index in group.starting:
            group.is_listed[index] = True
            group.report(index, EngineEvent.STARTED)
        group.starting.clear()


def _dtype_of(group: ServerGroupConfig, model_path: str, of_trainer: str | None) -> str:
    """Return the dtype in which a group of slime's own engines computes; empty if unknown."""
    if (asked := group.overrides.get("dtype")) is not None:
        return served_dtype(str(asked), model_path, of_fp32=dtype_of_fp32)
    return own_dtype(group.of_flags.get("dtype"), of_trainer) or ""


def _start_own_router(start_at: Callable[..., RouterHandle], wanted_port: int | None) -> RouterHandle:
    attempts_left = MAX_START_ATTEMPTS
    while True:
        port = wanted_port or find_available_port(random.randint(3000, 4000))
        try:
            return start_at(host=listen_address(), port=port)
        except PortTakenError as error:
            attempts_left -= 1
            if wanted_port and not is_port_available(wanted_port):
                raise ConfigError(
                    f"--sglang-router-port is {wanted_port}, which another process on this node uses; choose another, "
                    "or omit the flag."
                ) from error
            if not attempts_left:
                raise
            logger.warning("Restarting the router on other ports: %s", error)


def server_of(args: Namespace, model: ModelConfig, *, is_first: bool) -> RolloutServer:
    """Start or adopt the router of ``model``; the first model's address is set in ``args.sglang_router_ip/port``.

    Every model's address is recorded in ``args.sglang_model_routers`` under the model's name.
    """
    secret = Trust.of(args).job_secret
    start_at = partial(start_router, args, pd_disaggregation=model.has_prefill_decode, secret=secret)
    if is_first and args.sglang_router_ip and args.sglang_router_port:
        router = adopt_router(args.sglang_router_ip, args.sglang_router_port, secret=secret)
    else:
        router = _start_own_router(start_at, args.sglang_router_port if is_first else None)
    routers = dict(args.sglang_model_routers or {})
    routers[model.name] = (router.host, router.port)
    record_runtime(args, sglang_model_routers=routers)
    if is_first:
        record_runtime(args, sglang_router_ip=router.host, sglang_router_port=router.port)
    return RolloutServer(model, router, [], start_at)
