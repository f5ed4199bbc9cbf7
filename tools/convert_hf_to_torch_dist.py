"""Convert a Hugging Face model into a Megatron ``torch_dist`` checkpoint.

    source scripts/models/qwen3-4B.sh
    python tools/convert_hf_to_torch_dist.py ${MODEL_ARGS[@]} --hf-checkpoint MODEL --save MODEL_torch_dist
    torchrun --nproc-per-node 8 tools/convert_hf_to_torch_dist.py ${MODEL_ARGS[@]} --hf-checkpoint ... --save ...

The checkpoint can be loaded under any parallel layout.  Over several processes the model is split by pipeline stages
unless parallel flags say otherwise.  The result lies in ``SAVE/release`` and is what ``--ref-load`` takes.
"""

from __future__ import annotations

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

from slime.arguments.parser import build_parser, refuse_unknown
from slime.observability.logging_utils import configure_logger
from slime.utils import env
from slime.utils.errors import ConfigError
from slime.utils.net import get_free_port
from tools.cli import clean_exit

logger = logging.getLogger(__name__)


def parse(argv: Sequence[str]) -> Namespace:
    """The tool's arguments: every model and layout flag of training, ``--hf-checkpoint`` and ``--save``."""
    parser = build_parser(with_engine_flags=False)
    for action in parser._actions:
        action.required = False  # what a training run must say (batch sizes) a conversion need not
    args, leftover = parser.parse_known_args(list(argv))
    refuse_unknown(parser, argv, leftover)
    for flag in ("hf_checkpoint", "save"):
        if not getattr(args, flag):
            raise ConfigError(
                f"--{flag.replace('_', '-')} is missing; the conversion needs --hf-checkpoint and --save"
            )
    if not (Path(args.hf_checkpoint) / "config.json").exists():
        raise ConfigError(f"--hf-checkpoint {args.hf_checkpoint}: no config.json in it; name a Hugging Face folder")
    return args


def pipeline_split(num_layers: int, world_size: int) -> tuple[int, int | None]:
    """Pipeline size and layers of the last stage, when no flag says how to split.

    All processes become pipeline stages of ``ceil(layers / stages)`` layers; the last takes the rest.  While it would
    get none, the number of stages is halved.

    >>> pipeline_split(92, 16)
    (16, 2)
    >>> pipeline_split(47, 8)
    (8, 5)
    """
    if world_size > num_layers:
        raise ConfigError(f"{world_size} processes for {num_layers} layers: a pipeline stage needs a layer of its own")
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
    """``(rank, world size, local rank)`` from torchrun's variables, SLURM's, or a world of one."""
    world_size = env.get_int("WORLD_SIZE", env.get_int("SLURM_NTASKS", 1))
    rank = env.get_int("RANK", env.get_int("SLURM_PROCID", 0))
    local_rank = env.get_int("LOCAL_RANK", env.get_int("SLURM_LOCALID", 0))
    if env.get_str("MASTER_ADDR") is None:
        env.export({"MASTER_ADDR": "127.0.0.1"})
    if env.get_str("MASTER_PORT") is None:
        env.export({"MASTER_PORT": str(get_free_port(12355) if world_size == 1 else 12355)})
    env.export({"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local_rank)})
    return rank, world_size, local_rank


def with_values(args: Namespace, **values: object) -> Namespace:
    """A copy of ``args`` with some values replaced."""
    return Namespace(**(vars(args) | values))


def convert(args: Namespace) -> Path:
    """Load, lay out, save; gives the checkpoint's folder."""
    from slime.backends.megatron_utils import initialize
    from slime.backends.megatron_utils.arguments import validate_megatron_arguments
    from slime.backends.megatron_utils.checkpoint import RELEASE, publish_checkpoint, save_checkpoint
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model import build_model

    rank, world_size, local_rank = rendezvous()
    if world_size > 1 and args.pipeline_model_parallel_size == 1 and args.tensor_model_parallel_size == 1:
        if args.expert_model_parallel_size == 1:
            stages, last = pipeline_split(args.num_layers, world_size)
            args = with_values(args, pipeline_model_parallel_size=stages, decoder_last_pipeline_num_layers=last)
    args = with_values(
        args,
        rank=rank,
        world_size=world_size,
        actor_num_nodes=1,
        actor_num_gpus_per_node=world_size,
        micro_batch_size=1,
        global_batch_size=world_size,
        no_save_optim=True,
        no_save_rng=True,
    )
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
    )
    validate_megatron_arguments(args)
    initialize.init(args)
    start = time.monotonic()
    model = build_model(args, wrap_with_ddp=False)
    load_hf_weights(args, model, args.hf_checkpoint)
    loaded = time.monotonic()
    folder = save_checkpoint(args, RELEASE, model, None, None)
    if rank == 0:
        publish_checkpoint(args.save, RELEASE)
        logger.info(
            "converted %s to %s: %.1f s to load, %.1f s to save",
            args.hf_checkpoint,
            folder,
            loaded - start,
            time.monotonic() - loaded,
        )
    dist.barrier()
    dist.destroy_process_group()
    return folder


def main() -> None:
    """The command line."""
    configure_logger()
    with clean_exit():
        convert(parse(sys.argv[1:]))


if __name__ == "__main__":
    main()
