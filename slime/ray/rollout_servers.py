"""The engines of one run: which exist, how they start, recover and give their memory away.

A *model* (``RolloutServer``) has a router and one or more *groups* of like engines (``ServerGroup``).  The layout
comes from ``--sglang-config``, ``--prefill-num-servers``, or is one group of regular engines.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

import ray

from slime.backends.sglang_utils.router_process import RouterHandle
from slime.backends.sglang_utils.sglang_config import ModelConfig, ServerGroupConfig, resolve_sglang_config
from slime.ray.engine_actor import start_engine_actor
from slime.ray.placement_group import GpuSlice, plan_gpus
from slime.ray.router import start_model_router
from slime.ray.server_addresses import PortCursors, allocate_addresses
from slime.ray.waiting import wait_for
from slime.utils.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)

CREATES_NO_ENGINE = ("placeholder",)


@dataclass
class ServerGroup:
    """Like engines of one model on a run of GPUs.

    ``all_engines`` has one actor per engine and node, or None where an engine has died; ``engines`` are the actors of
    the first nodes, which serve HTTP.
    """

    args: Namespace
    gpus: GpuSlice
    model: ModelConfig
    config: ServerGroupConfig
    gpu_offset: int
    rank_offset: int
    router: RouterHandle | None
    needs_offload: bool
    cursors: PortCursors
    all_engines: list[Any] = field(default_factory=list)
    num_new_engines: int = 0

    def __post_init__(self) -> None:
        self.all_engines = [None] * (self.config.num_gpus // self.gpus_per_actor)
        end = self.gpu_offset + len(self.all_engines) * self.gpus_per_actor
        if end > len(self.gpus.bundle_indices):
            raise ConfigError(
                f"server group {self.config.worker_type!r} of model {self.model.name!r} needs GPUs up to {end}, but "
                f"the engines have {len(self.gpus.bundle_indices)}. Set --rollout-num-gpus or the group's num_gpus."
            )

    @property
    def num_gpus_per_engine(self) -> int:
        """GPUs of one engine."""
        return self.config.num_gpus_per_engine

    @property
    def gpus_per_actor(self) -> int:
        """GPUs that one actor covers: its engine's, or those of one node when the engine spans several."""
        return min(self.num_gpus_per_engine, self.args.num_gpus_per_node)

    @property
    def nodes_per_engine(self) -> int:
        """Actors of one engine."""
        return max(1, self.num_gpus_per_engine // self.args.num_gpus_per_node)

    @property
    def engines(self) -> list[Any]:
        """The actors that serve HTTP, None for an engine that has died."""
        return self.all_engines[:: self.nodes_per_engine]

    @property
    def engine_gpu_offsets(self) -> list[int]:
        """First GPU of each engine within the engines' slice."""
        return [self.gpu_offset + index * self.num_gpus_per_engine for index in range(len(self.engines))]

    def start(self) -> list[ray.ObjectRef]:
        """Start every engine that is missing; gives references that resolve once they serve."""
        if self.config.worker_type in CREATES_NO_ENGINE:
            return []
        missing = [rank for rank, engine in enumerate(self.all_engines) if engine is None]
        for rank in missing:
            position = self.gpu_offset + rank * self.gpus_per_actor
            overrides = dict(self.config.overrides)
            if self.args.offload_rollout and not self.needs_offload:
                overrides.setdefault("enable_memory_saver", False)
            self.all_engines[rank] = start_engine_actor(
                self.gpus,
                position,
                self.args,
                rank=self.rank_offset + rank,
                worker_type=self.config.worker_type,
                base_gpu_id=self.gpus.gpu_ids[position],
                sglang_overrides=overrides,
                num_gpus_per_engine=self.num_gpus_per_engine,
                model_path=self.model.model_path,
            )
        engines = [self.all_engines[rank] for rank in missing]
        addresses = allocate_addresses(
            self.args,
            engines,
            nodes_per_engine=self.nodes_per_engine,
            worker_type=self.config.worker_type,
            cursors=self.cursors,
        )
        self.num_new_engines += len(missing) // self.nodes_per_engine
        return [
            engine.init.remote(
                **address.as_init_arguments(),
                router_ip=self.router.host if self.router else None,
                router_port=self.router.port if self.router else None,
                timeout_s=self.args.engine_start_timeout_s,
            )
            for engine, address in zip(engines, addresses, strict=True)
        ]

    def mark_dead(self, index: int) -> None:
        """Kill every actor of engine ``index`` and free its slots for :meth:`start`."""
        first = index * self.nodes_per_engine
        for rank in range(first, first + self.nodes_per_engine):
            if self.all_engines[rank] is not None:
                ray.kill(self.all_engines[rank])
                self.all_engines[rank] = None


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


def start_rollout_servers(args: Namespace, gpus: GpuSlice) -> tuple[list[RolloutServer], list[ray.ObjectRef]]:
    """Start routers and engines.

    Returns:
        The servers, and references that resolve once all engines serve; until then the caller may do other work.
    """
    cursors = PortCursors()
    servers: list[RolloutServer] = []
    starting: list[ray.ObjectRef] = []
    gpu_offset = rank_offset = 0
    for index, model in enumerate(resolve_sglang_config(args).models):
        router = start_model_router(args, model, is_first=index == 0)
        server = RolloutServer(model, router, [])
        for group_config in model.server_groups:
            group = ServerGroup(
                args=args,
                gpus=gpus,
                model=model,
                config=group_config,
                gpu_offset=gpu_offset,
                rank_offset=rank_offset,
                router=router,
                needs_offload=_needs_offload(args, gpu_offset),
                cursors=cursors,
            )
            starting += group.start()
            server.groups.append(group)
            gpu_offset += group_config.num_gpus
            rank_offset += len(group.all_engines)
        servers.append(server)
    return servers, starting


def _needs_offload(args: Namespace, gpu_offset: int) -> bool:
    """Only engines on GPUs that the trainer uses too have to make room."""
    trainer_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
    return bool(args.offload_rollout) and plan_gpus(args).rollout_offset + gpu_offset < trainer_gpus


def wait_until_serving(args: Namespace, starting: list[ray.ObjectRef]) -> None:
    """Until every engine that is starting answers.

    Raises:
        EngineError: an engine ended or did not answer within ``--engine-start-timeout-s``.
    """
    if starting:
        # The engines keep their own deadline; this one only catches an actor that never ran.
        wait_for(starting, what="the SGLang engines to start", timeout_s=args.engine_start_timeout_s + 120)


def first_dead_engine(groups: list[ServerGroup], timeout_s: float) -> str | None:
    """A sentence about the first engine whose server has ended; None while all of them run.

    Args:
        groups: the groups to ask.
        timeout_s: an actor that says nothing for so long counts as busy, not dead; its death is reported by Ray.
    """
    asked = {
        engine.describe_exit.remote(): (group, index)
        for group in groups
        for index, engine in enumerate(group.engines)
        if engine is not None
    }
    if not asked:
        return None
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
    for ref in done:
        group, index = asked[ref]
        try:
            sentence = wait_for(ref, what="an engine's state", timeout_s=10)
        except EngineError as error:
            sentence = str(error)
        if sentence:
            return f"engine {index} ({group.config.worker_type}) of model {group.model.name!r}: {sentence}"
    return None
