"""Engines that somebody else runs, as server groups: adopted, updated and asked, but never started or ended here."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import ray

from slime.backends.sglang_utils.external_engines import ExternalEngineInfo, check_capabilities
from slime.backends.sglang_utils.sglang_config import ModelConfig, ServerGroupConfig
from slime.ray.engine_actor import start_engine_actor
from slime.ray.placement_group import GpuSlice
from slime.ray.server_addresses import PortCursors
from slime.ray.server_group import ServerGroup
from slime.weights.push.verbs import RECEIVER

logger = logging.getLogger(__name__)

NO_GPUS = GpuSlice(None, [], [])


class ExternalGroup(ServerGroup):
    """One external engine.  A dead one is not replaced: its owner starts it again, or the run ends."""

    info: ExternalEngineInfo

    @property
    def gpus_per_actor(self) -> int:
        """One actor speaks for all of the engine's nodes."""
        return self.num_gpus_per_engine

    @property
    def nodes_per_engine(self) -> int:
        """As if it were on one node."""
        return 1

    @property
    def acknowledges_pushes(self) -> bool:
        """Its owner may have started it with our loader."""
        return RECEIVER in (self.info.server_args.get("custom_weight_loader") or ())

    def _check_placement(self) -> None:
        """It takes none of our GPUs."""

    def _launch(self, indices: Sequence[int], *, register: bool) -> list[ray.ObjectRef]:
        self.all_engines[0] = start_engine_actor(
            None,
            0,
            self.args,
            rank=self.rank_offset,
            node_rank=0,
            worker_type=self.config.worker_type,
            num_gpus_per_engine=self.num_gpus_per_engine,
            model_path=self.model.model_path,
        )
        self.urls[0] = self.info.url
        self.bootstrap_ports[0] = self.info.disaggregation_bootstrap_port
        return [
            self.all_engines[0].connect.remote(
                self.info.url,
                tp_size=self.info.sizes.get("tp_size", 1),
                bootstrap_port=self.info.disaggregation_bootstrap_port,
                router_ip=self.router.host if self.router else None,
                router_port=self.router.port if self.router else None,
            )
        ]

    def replace(self, index: int, reason: str) -> None:
        """Not ours to start again: the run ends with the reason."""
        self.given_up = (
            f"the external {self.name_of(index)} at {self.info.url} is of no use any more: {reason}. Start it again, "
            "then the job"
        )


def external_model(args: Namespace) -> ModelConfig:
    """The one model that external engines serve."""
    groups = tuple(
        ServerGroupConfig(worker_type=info.worker_type, num_gpus=info.num_gpus, num_gpus_per_engine=info.num_gpus)
        for info in args.rollout_external_engine_infos
    )
    return ModelConfig(name="default", model_path=args.hf_checkpoint, update_weights=True, server_groups=groups)


def start_external_group(args: Namespace, info: ExternalEngineInfo, **where: Any) -> ExternalGroup:
    """The group of one external engine; ``where`` are the fields of :class:`ServerGroup` that place it.

    Raises:
        ConfigError: the engine lacks what this run needs of it.
    """
    check_capabilities(args, info)
    group = ExternalGroup(args=args, gpus=NO_GPUS, needs_offload=False, cursors=PortCursors(), **where)
    group.info = info
    logger.info("external engine %s: %s, %d GPUs", info.url, info.worker_type, info.num_gpus)
    return group
