"""Builds the model, its optimizer and its scheduler.

Elsewhere: the model's layers (``model_provider``), the checkpoint format (``checkpoint``), the optimizer step
(``train_step``).
"""

from __future__ import annotations

import contextlib
import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamKey
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from megatron.core.transformer.module import Float16Module

from slime.backends.megatron_utils.adam import fuse
from slime.backends.megatron_utils.flags.config_builders import ddp_config_from_args, optimizer_config_from_args
from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.backends.megatron_utils.flags.resolve_arguments import warmup_steps
from slime.backends.megatron_utils.hf_to_megatron import keep_fp32
from slime.backends.megatron_utils.model_provider import check_trained_parameters, get_model_provider
from slime.backends.megatron_utils.model_transform import ModelTransform, transforms_of
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

ModelChunks = list[torch.nn.Module]
"""The model's parts on this rank: one, or one per virtual pipeline stage."""


def build_model(
    args: Namespace,
    role: str = "actor",
    transforms: Sequence[type[ModelTransform]] = (),
    *,
    wrap_with_ddp: bool = True,
    on_accelerator: bool = True,
) -> ModelChunks:
    """Build this rank's part of the model on its device, in its precision.

    Args:
        role: ``"critic"`` gets a value head.
        wrap_with_ddp: add gradient buffers and their reduction; without them the model can only run forward.
        on_accelerator: False keeps the model in host memory.
    """
    provider = get_model_provider(args, role, [make(args) for make in transforms])
    virtual_size = mpu.get_virtual_pipeline_model_parallel_world_size()
    chunks: ModelChunks = []
    for stage in range(virtual_size) if virtual_size else (None,):
        chunks.append(
            provider(
                pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                vp_stage=stage,
            )
        )
    if role == "actor":
        check_trained_parameters(
            chunks,
            only_train=args.only_train_params_name_list or [],
            freeze=args.freeze_params_name_list or [],
        )
    for chunk in chunks:
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if torch.cuda.is_available() and on_accelerator:
            chunk.cuda(torch.cuda.current_device())
    num_parameters = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    if mpu.get_data_parallel_rank(with_context_parallel=True) == 0:
        logger.info(
            "Built the %s: %s parameters on tensor rank %d, pipeline rank %d.",
            role, f"{num_parameters:,}", mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank(),
        )  # fmt: skip
    config = chunks[0].config
    if config.fp16 or config.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    keep_fp32(chunks, str(args.hf_checkpoint or ""), args.model_name, model_dims(args))
    if wrap_with_ddp:
        ddp_config = ddp_config_from_args(args)
        chunks = [
            # Bucketing pays off only for the first chunk, whose gradients are reduced last.
            DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
    return chunks


def build_optimizer(args: Namespace, model: ModelChunks) -> MegatronOptimizer:
    """Build the distributed optimizer over the model's gradient buffers.

    Raises:
        ConfigError: the optimizer is offloaded only in part, and the model has fp32 parameters.
    """
    config = optimizer_config_from_args(args)
    if args.optimizer_cpu_offload and args.optimizer_offload_fraction < 1:
        kept = [name for chunk in model for name, one in chunk.named_parameters() if one.dtype == torch.float32]
        if kept:
            raise ConfigError(
                f"--optimizer-offload-fraction is {args.optimizer_offload_fraction}, and {kept[0]} stays in fp32, as "
                "--hf-checkpoint has it; megatron-core does not step fp32 parameters that stay on the GPU; use 1.0."
            )
    # Shards of fp32 parameters are views; the offloading optimizer accepts them only as leaf tensors.
    with torch.no_grad() if config.optimizer_cpu_offload else contextlib.nullcontext():
        optimizer = get_megatron_optimizer(
            config,
            model,
            config_overrides=_parameter_groups(config, args.lr_factors),
            use_gloo_process_groups=args.enable_gloo_process_groups,
        )
    for transform in transforms_of(model[0]):
        transform.after_optimizer(optimizer)
    fuse(optimizer)
    return optimizer


def _parameter_groups(config: OptimizerConfig, factors: Mapping[str, float]) -> dict[ParamKey, ParamGroupOverride]:
    """Return megatron-core's default parameter groups, plus one per learning-rate factor."""
    groups = get_standard_config_overrides(config)
    for pattern, factor in factors.items():
        # The scheduler reads max_lr and min_lr; checkpoints tell groups apart by ``lr_mult``.
        ends = {"max_lr": config.lr * factor, "min_lr": config.min_lr * factor}
        rates: Any = {"lr_mult": factor, **ends}
        groups[ParamKey(name=pattern)] = rates
    return groups


def build_scheduler(args: Namespace, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Build the scheduler of learning rate and weight decay.

    Flags count optimizer steps; the scheduler counts samples, so every length is multiplied by the global batch size.

    Raises:
        ConfigError: the warm-up is as long as the whole decay.  With ``--num-epoch`` the length of the run, and hence
            of the decay, is known only here; otherwise the flags are checked earlier.
    """
    unit = args.global_batch_size
    num_samples = args.num_rollout * args.rollout_batch_size * args.n_samples_per_prompt
    train_iters = max(num_samples // args.global_batch_size, 1)
    decay_iters = args.lr_decay_iters or train_iters
    warmup_iters = warmup_steps(decay_iters, args.lr_warmup_iters, args.lr_warmup_fraction)
    wsd_iters = args.lr_wsd_decay_iters
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup_iters * unit,
        lr_decay_steps=decay_iters * unit,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=train_iters * unit,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=wsd_iters * unit if wsd_iters is not None else None,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


def setup_model_and_optimizer(
    args: Namespace, role: str = "actor", transforms: Sequence[type[ModelTransform]] = ()
) -> tuple[ModelChunks, MegatronOptimizer | None, OptimizerParamScheduler | None]:
    """Build model, optimizer and scheduler, freshly initialized; with ``--num-rollout 0`` only the model."""
    model = build_model(args, role, transforms)
    if args.num_rollout == 0:
        return model, None, None
    optimizer = build_optimizer(args, model)
    return model, optimizer, build_scheduler(args, optimizer)
