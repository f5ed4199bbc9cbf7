"""The trainer's side of the push matrix: real models, real pushes, every mode in turn on the same ranks."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.model import build_model
from slime.backends.megatron_utils.update_weight.updater import WeightUpdater
from slime.backends.sglang_utils import cpu_shim
from slime.compose import parts
from slime.ray.parts import load_all
from slime.utils.distributed_utils import init_gloo_group
from slime.utils.errors import SlimeError
from tests.matrix import layout_rank
from tests.matrix.case import read_config
from tests.matrix.layouts import _case
from tests.push_matrix.engines import Client

BUCKET_BYTES = 16 * 1024
"""So small that a tiny model makes many buckets."""
TIMEOUT_S = 90.0


@dataclass(frozen=True)
class Job:
    """One cell, as its ranks need it."""

    mode: str
    folder: str
    """The engines' checkpoint: bf16, or quantized."""
    engines: tuple[tuple[str, int, int], ...]
    """Address, first GPU and number of GPUs of each engine."""
    disk: str
    """A separate, empty folder."""
    expected: tuple[str, ...]
    """Digest that each engine must have after the first push."""


@dataclass
class Result:
    """The result of a cell."""

    problem: str = ""
    digests: list[str] = field(default_factory=list)
    num_buckets: int = 0


def push_on_rank(
    name: str, config: dict[str, object], plain_folder: str, flags: Sequence[object], jobs: Sequence[Job]
) -> list[Result]:
    """All cells of one family and layout."""
    logging.disable(logging.WARNING)
    cpu_shim.install()  # the plain push uses SGLang's bucket format
    init_gloo_group()
    args = layout_rank.start(_case(name, config), Path(plain_folder), (*flags, "--bf16"))
    model = build_model(args, transforms=load_all(parts(args).transforms))
    load_hf_weights(args, model, plain_folder)
    return [_push(args, model, job) for job in jobs]


def _push(args: Namespace, model: Any, job: Job) -> Result:
    config = read_config(Path(job.folder))
    disk_flags = {
        "update_weight_disk_dir": f"{job.disk}/versions",
        "update_weight_local_checkpoint_dir": f"{job.disk}/host" if job.mode == "delta" else None,
        "update_weight_disk_keep_files": False,
        "update_weight_start_version": 0,
        "update_weight_delta_encoding": "xor",
        "update_weight_delta_checksum": "xxh3-128",
        "custom_update_weight_post_write_path": None,
        "sglang_custom_pull_weights_pre_read_hook": None,
    }
    cell_args = Namespace(
        **{
            **vars(args),
            **disk_flags,
            "hf_checkpoint": job.folder,
            "check_weight_update_equal": job.mode != "plain",
            "weight_push": "plain" if job.mode == "plain" else "verified",
            "update_weight_buffer_size": BUCKET_BYTES,
            "weight_update_timeout_s": TIMEOUT_S,
            "colocate": job.mode in ("colocated", "mixed", "plain"),
            "update_weight_mode": "delta" if job.mode == "delta" else "full",
            "update_weight_transport": "disk" if job.mode in ("disk", "delta") else "nccl",
        }
    )
    engines = [
        Client(
            address, index=index, num_gpus=count, gpu_offset=offset,
            is_colocated=offset + count <= dist.get_world_size(),
        )
        for index, (address, offset, count) in enumerate(job.engines)
    ]  # fmt: skip
    if dist.get_rank() == 0:
        for engine in engines:
            engine.now("become", job.folder, "bfloat16", disk_flags)
    dist.barrier()
    transport = parts(cell_args).transport
    updater = WeightUpdater(
        cell_args, model, lambda: None, hf_config=config, make_transport=transport and transport.load()
    )
    result = Result()
    try:
        updater.connect(engines, len(engines))
        first = _push_once(updater, engines, result)
        if first != list(job.expected):
            result.problem = result.problem or f"the engines hold {first}; the checkpoint is {list(job.expected)}"
        _scale(model, 0.5)
        second = _push_once(updater, engines, Result())
        _scale(model, 2.0)
        if dist.get_rank() == 0 and any(one == other for one, other in zip(first, second, strict=True)):
            result.problem = result.problem or "the second push changed nothing"
        assert updater.report is not None
        result.digests, result.num_buckets = first, updater.report.num_buckets
    except (SlimeError, RuntimeError, OSError) as error:
        result.problem = f"{type(error).__name__}: {error}"
    updater.close()
    dist.barrier()
    for engine in engines:
        engine.close()
    return result


def _push_once(updater: WeightUpdater, engines: Sequence[Client], result: Result) -> list[str]:
    """Push, check that all engines serve it, and return their digests (on all ranks)."""
    report = updater.push()
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        if report.excluded:
            result.problem = f"engine {report.excluded[0].index} is excluded: {report.excluded[0].reason}"
        versions = [engine.now("get_weight_version") for engine in engines]
        if set(versions) != {str(report.version)}:
            result.problem = result.problem or f"the engines serve {versions}, not {report.version}"
        told = [[engine.now("digest") for engine in engines]]
    dist.broadcast_object_list(told, src=0)
    return told[0]


@torch.no_grad()
def _scale(model: Any, factor: float) -> None:
    """Halve or double every parameter, which is exact in every dtype."""
    for chunk in model:
        for parameter in chunk.parameters():
            parameter.mul_(factor)
