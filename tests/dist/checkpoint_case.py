"""A tiny MoE model with an MTP layer and frozen parameters, built under any layout, with optimizer state."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FLAGS = (
    "--num-layers 4 --hidden-size 48 --ffn-hidden-size 80 --num-attention-heads 6 --group-query-attention "
    "--num-query-groups 2 --kv-channels 16 --vocab-size 131 --make-vocab-size-divisible-by 8 --rotary-base 10000 "
    "--norm-epsilon 1e-6 --swiglu --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm "
    "--qk-layernorm --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--num-experts 4 --moe-layer-freq [0,1,1,1] --moe-ffn-hidden-size 24 --moe-router-topk 2 "
    "--moe-shared-expert-intermediate-size 40 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-grouped-gemm --moe-router-load-balancing-type none --mtp-num-layers 1 --enable-mtp-training "
    "--lr 1e-2 --lr-decay-style cosine --lr-warmup-iters 1 --weight-decay 0.1 --clip-grad 1.0 "
    "--global-batch-size 6 --num-rollout 8 --rollout-batch-size 6 --n-samples-per-prompt 1 "
    "--freeze-params-name-list q_layernorm"
).split()


def parse(*flags: str, folder: str) -> Namespace:
    """Complete flags, saving to and loading from ``folder``."""
    from slime.backends.megatron_utils.arguments import validate_megatron_arguments
    from slime.compose import flag_groups
    from slime.flags.cluster import derive_for_extensions
    from slime.flags.group import complete_all
    from slime.flags.parse import build_parser

    parser = build_parser(with_engine_flags=False, groups=flag_groups())
    args = parser.parse_args([*FLAGS, *flags, "--save", folder, "--load", folder])
    args.actor_num_gpus_per_node = dist.get_world_size()
    derive_for_extensions(args)
    validate_megatron_arguments(args)
    complete_all(args, flag_groups())
    return args


def build(args: Namespace) -> tuple[list, Any, Any]:
    """Model, optimizer and scheduler over newly created parallel groups."""
    from megatron.core import mpu

    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.model import build_model, build_optimizer, build_scheduler
    from slime.compose import parts
    from slime.ray.parts import load_all

    if mpu.is_initialized():
        mpu.destroy_model_parallel()
    init(args)
    model = build_model(args, transforms=load_all(parts(args).transforms))
    optimizer = build_optimizer(args, model)
    return model, optimizer, build_scheduler(args, optimizer)


def take_step(model: list, optimizer: Any, scheduler: Any, seed: int) -> None:
    """An optimizer step on random gradients, different for every element of a bucket."""
    generator = torch.Generator().manual_seed(seed + 1000 * dist.get_rank())
    for chunk in model:
        chunk.zero_grad_buffer()
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            buffer.grad_data.copy_(torch.randn(buffer.grad_data.shape, generator=generator))
    optimizer.step()
    scheduler.step(increment=6)


def tensors_in(folder: Path, vocab_size: int = 131) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, complete and without vocabulary padding."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    padded = ("word_embeddings.weight", "output_layer.weight")
    return {key: tensor[:vocab_size] if key.endswith(padded) else tensor for key, tensor in tensors.items()}
