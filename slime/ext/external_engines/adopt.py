"""Put external engines behind a router of the job, each as a separate group."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence

import ray

from slime.backends.megatron_utils.models import dtype_of_fp32
from slime.backends.sglang_utils.sglang_config import ModelConfig, ServerGroupConfig, served_dtype, trainer_dtype
from slime.ext.external_engines.discovery import ExternalEngineInfo, check_capabilities
from slime.flags.security import Trust
from slime.ray.engines.actor import PortCursors, start_engine_actor
from slime.ray.engines.group import EngineGroup
from slime.ray.engines.models import RolloutServer, server_of
from slime.ray.gpus import GpuSlice
from slime.utils.http_utils import add_job_servers

logger = logging.getLogger(__name__)

_SHORT_NAMES = {"half": "float16", "float": "float32"}
_TRAINER_FLAGS = {"float16": "--fp16", "bfloat16": "--bf16", "float32": "--fp32"}


def adopt_external_engines(args: Namespace, gpus: GpuSlice) -> list[RolloutServer]:
    """Adopt the external engines of a run: an actor without a GPU represents each, and ``gpus`` are none.

    Raises:
        ConfigError: an engine lacks what this run needs of it.
    """
    configs = tuple(
        ServerGroupConfig(worker_type=info.worker_type, num_gpus=info.num_gpus, num_gpus_per_engine=info.num_gpus)
        for info in args.rollout_external_engine_infos
    )
    model = ModelConfig(name="default", model_path=args.hf_checkpoint, update_weights=True, server_groups=configs)
    server = server_of(args, model, is_first=True)
    gpu_offset = 0
    for rank, (info, config) in enumerate(zip(args.rollout_external_engine_infos, model.server_groups, strict=True)):
        check_capabilities(args, info)
        dtype = _told_dtype(info, model.model_path)
        warn_of_other_dtype(info.url, served=dtype, trained=trainer_dtype(args))
        group = ExternalGroup(
            args=args,
            gpus=gpus,
            model=model,
            config=config,
            gpu_offset=gpu_offset,
            rank_offset=rank,
            router=server.router,
            needs_offload=False,
            cursors=PortCursors(),
            restarts=False,
            dtype=dtype,
            weight_loaders=tuple(info.server_args.get("custom_weight_loader") or ()),
            worker_key=Trust.of(args).job_secret,
            nodes_per_engine=1,
        )
        group.info = info
        logger.info("External engine %s: %s, %d GPUs", info.url, info.worker_type, info.num_gpus)
        server.groups.append(group)
        group.start()
        gpu_offset += config.num_gpus
    return [server]


def _told_dtype(info: ExternalEngineInfo, model_path: str) -> str:
    """Return the dtype that an external engine tells, or that follows from the checkpoint that it was started with."""
    told = info.server_args
    folder = told.get("model_path") or model_path
    return served_dtype(str(told.get("dtype") or "auto"), folder, of_fp32=dtype_of_fp32)


def warn_of_other_dtype(url: str, *, served: str, trained: str | None) -> None:
    """Warn of an engine that computes in another dtype than the trainer; "" for ``served`` is unknown."""
    served = _SHORT_NAMES.get(served, served)
    if not served or trained is None or served == trained:
        return
    flag = _TRAINER_FLAGS.get(served)
    logger.warning(
        "The external engine %s computes in %s and the trainer in %s, so that their log-probs differ (|dlogp|) and "
        "the narrower one rounds the weights; start the engine with --dtype %s%s",
        url, served, trained, trained, f", or give {flag} to this run" if flag else "",
    )  # fmt: skip


class ExternalGroup(EngineGroup):
    """One external engine: adopted, updated and asked, but never started or ended here.

    One actor represents all of its nodes.
    """

    info: ExternalEngineInfo

    def name_of(self, index: int) -> str:
        """Return the engine in words."""
        return f"the external {super().name_of(index)} at {self.info.url}"

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
        add_job_servers(self.info.url)
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

    def _shut_down(self, index: int) -> None:
        """Leave the server running: it belongs to the user."""
