"""The engines of one run: which models exist, with which routers and groups of engines, and how all of it starts.

A *model* (``RolloutServer``) has a router and one or more *groups* of like engines (``ServerGroup``).  The layout
comes from ``--sglang-config``, ``--prefill-num-servers``, ``--rollout-external-engine-addrs``, or is one group of
regular engines.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray

from slime.arguments import record_runtime
from slime.backends.sglang_utils.router_process import RouterHandle, find_worker, register_worker
from slime.backends.sglang_utils.server_control import ServerControl
from slime.backends.sglang_utils.sglang_config import ModelConfig, resolve_sglang_config
from slime.ray.external_group import external_model, start_external_group
from slime.ray.placement_group import GpuSlice, plan_gpus
from slime.ray.router import restart_model_router, start_model_router
from slime.ray.server_addresses import PortCursors
from slime.ray.server_group import CREATES_NO_ENGINE, EngineState, ServerGroup
from slime.ray.waiting import wait_for

logger = logging.getLogger(__name__)

__all__ = [
    "CREATES_NO_ENGINE",
    "RolloutServer",
    "ServerGroup",
    "first_dead_engine",
    "start_rollout_servers",
    "wait_until_serving",
]


@dataclass
class RolloutServer:
    """One model: its router and its groups of engines."""

    config: ModelConfig
    router: RouterHandle | None
    groups: list[ServerGroup]

    @property
    def engines(self) -> list[Any]:
        """Every live engine of the model."""
        return [engine for group in self.groups for engine in group.engines if engine is not None]

    @property
    def has_serving_engine(self) -> bool:
        """Whether some engine of the model is up."""
        return any(group.indices(EngineState.SERVING, EngineState.READY) for group in self.groups)

    def restart_router(self, args: Namespace) -> None:
        """Start the router again at its old address and tell it of the engines that serve.

        Raises:
            ProcessError: it does not start, or does not list an engine.
        """
        assert self.router is not None
        self.router = restart_model_router(args, self.config, self.router)
        control = ServerControl(self.router.url, name="the router")
        for group in self.groups:
            group.router = self.router
            for index in group.indices(EngineState.SERVING):
                url = group.urls[index]
                if url is not None and group.config.worker_type != "encoder" and find_worker(control, url) is None:
                    register_worker(
                        control,
                        url,
                        worker_type=group.config.worker_type,
                        bootstrap_port=group.bootstrap_ports[index],
                    )


def start_rollout_servers(args: Namespace, gpus: GpuSlice) -> tuple[list[RolloutServer], list[ray.ObjectRef]]:
    """Start routers and engines, or adopt external ones.

    Returns:
        The servers, and references that resolve once all engines serve; until then the caller may do other work.
    """
    if args.rollout_external:
        return _adopt_external_engines(args)
    cursors = PortCursors()
    servers: list[RolloutServer] = []
    starting: list[ray.ObjectRef] = []
    gpu_offset = rank_offset = 0
    layout = resolve_sglang_config(args)
    if args.sglang_config is not None:
        # Requests go to the first model: GPUs of others, and those left empty, do not add to what it takes at a time.
        record_runtime(args, rollout_num_engines=layout.models[0].num_engines)
    for index, model in enumerate(layout.models):
        server = RolloutServer(model, start_model_router(args, model, is_first=index == 0), [])
        for config in model.server_groups:
            group = ServerGroup(
                args=args,
                gpus=gpus,
                model=model,
                config=config,
                gpu_offset=gpu_offset,
                rank_offset=rank_offset,
                router=server.router,
                needs_offload=_needs_offload(args, gpu_offset),
                cursors=cursors,
            )
            server.groups.append(group)
            gpu_offset += config.num_gpus
            rank_offset += len(group.all_engines)
        starting += _start_groups(args, server.groups)
        servers.append(server)
    return servers, starting


def _start_groups(args: Namespace, groups: list[ServerGroup]) -> list[ray.ObjectRef]:
    """Start the groups of a model; encoders first, because the others are told where these listen."""
    encoders = [group for group in groups if group.config.worker_type == "encoder"]
    if encoders:
        wait_until_serving(args, [ref for group in encoders for ref in group.start()])
        urls = [url for group in encoders for url in group.urls if url is not None]
        for group in groups:
            if group.config.worker_type in ("prefill", "regular"):
                group.extra_overrides = {"language_only": True, "encoder_urls": urls}
    return [ref for group in groups if group not in encoders for ref in group.start()]


def _adopt_external_engines(args: Namespace) -> tuple[list[RolloutServer], list[ray.ObjectRef]]:
    """Engines that somebody else started: an actor without a GPU speaks for each."""
    model = external_model(args)
    server = RolloutServer(model, start_model_router(args, model, is_first=True), [])
    starting: list[ray.ObjectRef] = []
    gpu_offset = 0
    for rank, (info, config) in enumerate(zip(args.rollout_external_engine_infos, model.server_groups, strict=True)):
        group = start_external_group(
            args, info, model=model, config=config, gpu_offset=gpu_offset, rank_offset=rank, router=server.router
        )
        server.groups.append(group)
        starting += group.start()
        gpu_offset += config.num_gpus
    return [server], starting


def _needs_offload(args: Namespace, gpu_offset: int) -> bool:
    """Only engines on GPUs that the trainer uses too have to make room."""
    trainer_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
    return bool(args.offload_rollout) and plan_gpus(args).rollout_offset + gpu_offset < trainer_gpus


def wait_until_serving(args: Namespace, starting: list[ray.ObjectRef]) -> None:
    """Until every engine that is starting answers.

    Raises:
        ProcessError: an engine ended or did not answer within ``--engine-start-timeout-s``.
    """
    if starting:
        # The engines keep their own deadline; this one only catches an actor that never ran.
        wait_for(starting, what="the SGLang engines to start", timeout_s=args.engine_start_timeout_s + 120)


def first_dead_engine(groups: Iterable[ServerGroup], timeout_s: float) -> str | None:
    """A sentence about the first engine whose server has ended; None while all of them run."""
    for group in groups:
        for index, sentence in group.find_exited(timeout_s).items():
            return f"{group.name_of(index)}: {sentence}"
    return None
