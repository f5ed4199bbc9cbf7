"""Convert a Hugging Face model into a Megatron ``torch_dist`` checkpoint.

    slime convert hf_to_torch_dist --hf-checkpoint MODEL --save MODEL_torch_dist
    torchrun --nproc-per-node 8 tools/convert_hf_to_torch_dist.py --hf-checkpoint MODEL --save MODEL_torch_dist

config.json describes the model; model flags may be given too, and must agree with it.  The checkpoint can be loaded in
any parallel layout.  Several processes split the model into pipeline stages, unless parallel flags say otherwise.  The
result is ``SAVE/release``, for ``--ref-load``.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from slime.compose import flag_groups
from slime.flags.cluster import derive_for_extensions
from slime.flags.group import complete_all
from slime.flags.parse import build_parser
from slime.flags.words import refuse_unknown
from slime.utils import env
from slime.utils.errors import ConfigError
from slime.utils.net import get_free_port
from tools.cli import logged_run

logger = logging.getLogger(__name__)


def parse(argv: Sequence[str]) -> Namespace:
    """Return the tool's arguments: every model and layout flag of training, ``--hf-checkpoint`` and ``--save``."""
    args = parse_training_flags(argv, needed=("hf_checkpoint", "save"), description=__doc__)
    if Path(args.save).resolve() == Path(args.hf_checkpoint).resolve():
        raise ConfigError(f"--save {args.save} is --hf-checkpoint; choose another folder")
    return args


def parse_training_flags(argv: Sequence[str], *, needed: Sequence[str], description: str | None) -> Namespace:
    """Parse all flags of a training run, of which only ``needed`` are required; ``description`` heads ``--help``.

    Raises:
        ConfigError: one of them is missing, a flag is unknown, or ``--hf-checkpoint`` is not a model folder.
    """
    from slime.backends.megatron_utils.arguments import fill_model_flags

    parser = build_parser(with_engine_flags=False, groups=flag_groups())
    parser.prog, parser.usage, parser.description = Path(sys.argv[0]).name, "%(prog)s [FLAGS]", description
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for action in parser._actions:
        action.required = False  # a conversion needs no batch sizes
    args, leftover = parser.parse_known_args(list(argv))
    refuse_unknown(parser, argv, leftover)
    for name in needed:
        if not getattr(args, name):
            flags = " and ".join(f"--{other.replace('_', '-')}" for other in needed)
            raise ConfigError(f"--{name.replace('_', '-')} is missing; this tool needs {flags}")
    if not (Path(args.hf_checkpoint) / "config.json").exists():
        raise ConfigError(f"--hf-checkpoint {args.hf_checkpoint}: no config.json in it; name a Hugging Face folder")
    vars(args).update(fill_model_flags(args))
    return args


def pipeline_split(num_layers: int, world_size: int) -> tuple[int, int | None]:
    """Return the pipeline size and layers of the last stage, when no flag says how to split.

    All processes become pipeline stages of ``ceil(layers / stages)`` layers; the last takes the rest.  The number of
    stages is halved until the last one gets a layer.

    >>> pipeline_split(92, 16)
    (16, 2)
    >>> pipeline_split(47, 8)
    (8, 5)
    """
    if world_size > num_layers:
        raise ConfigError(
            f"{world_size} processes for {num_layers} layers: each is a pipeline stage, which needs a layer; use fewer"
        )
    stages = world_size
    while True:
        last = num_layers - math.ceil(num_layers / stages) * (stages - 1)
        if last > 0:
            return stages, None if stages == 1 else last
        if stages % 2:
            raise ConfigError(
                f"{num_layers} layers cannot be split over {stages} pipeline stages; say how with "
                "--pipeline-model-parallel-size and --decoder-last-pipeline-num-layers"
            )
        stages //= 2


def rendezvous() -> tuple[int, int, int]:
    """Return ``(rank, world size, local rank)`` from torchrun's variables, SLURM's, or a world of one."""
    world_size = env.get_int("WORLD_SIZE", env.get_int("SLURM_NTASKS", 1))
    rank = env.get_int("RANK", env.get_int("SLURM_PROCID", 0))
    local_rank = env.get_int("LOCAL_RANK", env.get_int("SLURM_LOCALID", 0))
    if rank >= world_size:
        raise ConfigError(
            f"RANK and WORLD_SIZE (or SLURM_PROCID and SLURM_NTASKS) say rank {rank} of {world_size} processes; ranks "
            "begin at 0, so that the last is one less than their number."
        )
    if env.get_str("MASTER_ADDR") is None:
        env.export({"MASTER_ADDR": "127.0.0.1"})
    port = env.get_int("MASTER_PORT", 0) or (get_free_port(12355) if world_size == 1 else 12355)
    if port > 65535:
        raise ConfigError(f"The environment variable MASTER_PORT is {port}; a port is at most 65535.")
    env.export(
        {"MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local_rank)}
    )
    return rank, world_size, local_rank


def with_layout(args: Namespace, world_size: int | None = None) -> Namespace:
    """Return ``args`` for this many processes (default: all), in pipeline stages unless flags say otherwise."""
    world_size = world_size or rendezvous()[1]
    values: dict[str, object] = {
        "world_size": world_size,
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": world_size,
        "micro_batch_size": 1,
        "global_batch_size": world_size,
        "save_interval": 1,
        "no_save_optim": True,
        "no_save_rng": True,
        "debug_train_only": True,  # skips the checks of weight pushes
        "int4_qat": None,  # not even through the environment: nothing is trained
    }
    kinds = ("pipeline_model", "tensor_model", "expert_model", "context")
    if world_size > 1 and all(getattr(args, f"{kind}_parallel_size") == 1 for kind in kinds):
        stages, last = pipeline_split(args.num_layers, world_size)
        values |= {"pipeline_model_parallel_size": stages, "decoder_last_pipeline_num_layers": last}
    return Namespace(**(vars(args) | values))


def join_world(args: Namespace) -> Namespace:
    """Return complete ``args`` after joining the default process group and the parallel groups of this process.

    Raises:
        ConfigError: the flags disagree with each other, with the number of processes, or with the HF config.
    """
    from slime.backends.megatron_utils import initialize
    from slime.backends.megatron_utils.arguments import validate_megatron_arguments

    rank, world_size, local_rank = rendezvous()
    args.rank = rank
    derive_for_extensions(args)
    validate_megatron_arguments(args)
    complete_all(args, flag_groups())
    backend, num_gpus = "gloo", torch.cuda.device_count()
    if num_gpus:
        torch.cuda.set_device(local_rank % num_gpus)
        # NCCL refuses two ranks on one GPU.
        shares_gpu = env.get_int("LOCAL_WORLD_SIZE", 1) > num_gpus
        backend = "cpu:gloo,cuda:gloo" if shares_gpu else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
    )
    initialize.init(args)
    return args


def convert(args: Namespace) -> Path:
    """Convert the model one tensor at a time; returns the checkpoint's folder."""
    from tools.streamed_conversion import convert_hf_checkpoint

    without_adapters = Namespace(**(vars(args) | {"lora_rank": None}))  # given as flags that training shares
    args = join_world(with_layout(without_adapters))
    start = time.monotonic()
    folder = convert_hf_checkpoint(args, args.hf_checkpoint)
    if dist.get_rank() == 0:
        num_bytes, elapsed = sum(path.stat().st_size for path in folder.iterdir()), time.monotonic() - start
        logger.info("Converted %s to %s: %.2f GiB in %.1f s", args.hf_checkpoint, folder, num_bytes / 2**30, elapsed)
    dist.destroy_process_group()
    return folder


def main() -> None:
    """Run the command line."""
    with logged_run():
        convert(parse(sys.argv[1:]))


if __name__ == "__main__":
    main()
