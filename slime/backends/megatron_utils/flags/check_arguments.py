"""Checks of the trainer's complete flags that megatron-core's configs do not make themselves."""

from __future__ import annotations

import importlib
import math
from argparse import Namespace

import torch
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.flags.config_builders import (
    ddp_config_from_args,
    optimizer_config_from_args,
    transformer_config_from_args,
)
from slime.backends.megatron_utils.flags.field_table import has_narrow_moments
from slime.backends.megatron_utils.flags.own_flags import load_spec
from slime.backends.megatron_utils.flags.parallel import ParallelSizes, PipelineSplit
from slime.backends.megatron_utils.flags.resolve_arguments import warmup_steps
from slime.backends.megatron_utils.models import all_families
from slime.flags.data import MAY_GIVE_OTHER_COUNTS, BatchConfig
from slime.flags.group import FlagGroup, flag_of, problems_of
from slime.utils.errors import ConfigError

RULES = FlagGroup(
    needs=(("lr_decay_style=WSD", "lr_wsd_decay_iters", "that is the number of steps of its last phase"),),
)


def check_arguments(args: Namespace) -> None:
    """Check the combinations of the trainer's complete flags.

    Raises:
        ConfigError: names the flags, their values and what is allowed.
    """
    if problems := problems_of(args, [RULES]):
        raise ConfigError("\n".join(problems))
    sizes = ParallelSizes.from_args(args)
    _check_sizes(args)
    check_expert_layout(sizes, args.num_experts)
    _check_pipeline(PipelineSplit.from_args(args), args.microbatch_group_size_per_vp_stage)
    if args.global_batch_size and not any(getattr(args, name) for name in MAY_GIVE_OTHER_COUNTS):
        _check_batch(args.global_batch_size, BatchConfig.of(args), sizes, args.microbatch_group_size_per_vp_stage)
    _check_schedule(args)
    _check_experts(args)
    _check_linear_attention(args)
    config = transformer_config_from_args(args)
    _check_attention(config)
    if args.spec:
        load_spec(args.spec)
        check_stages = getattr(importlib.import_module(args.spec[0]), "check_stages", None)
        if check_stages is not None:  # the family restricts where the pipeline may be cut
            has_post_norms = args.post_self_attn_layernorm and args.post_mlp_layernorm
            check_stages(config, args.hf_checkpoint, has_post_norms)
    _check_optimizer(optimizer_config_from_args(args))
    ddp_config_from_args(args)


def check_taken_up(args: Namespace) -> None:
    """Reject Megatron flags that only extensions implement, if the extension is missing.

    Call it after every flag group has derived its values.

    Raises:
        ConfigError: names the flags and their values.
    """
    if has_narrow_moments(args.exp_avg_dtype, args.exp_avg_sq_dtype) and not vars(args).get("narrow_moments"):
        raise ConfigError(
            f"--exp-avg-dtype is {args.exp_avg_dtype} and --exp-avg-sq-dtype {args.exp_avg_sq_dtype}; torch's Adam "
            "keeps fp32 moments, and there is no extension that replaces it; drop both flags."
        )
    if args.fp8 and not vars(args).get("trains_in_fp8"):
        raise ConfigError(
            f"--fp8-format is {args.fp8}; there is no extension that trains linear layers in FP8; drop the flag."
        )


def _check_optimizer(config: OptimizerConfig) -> None:
    if config.optimizer != "adam":
        raise ConfigError(
            f"--optimizer is {config.optimizer!r}; megatron-core's distributed optimizer, which is always on here, "
            "shards Adam only; use adam (which is AdamW)."
        )
    is_fp32 = config.params_dtype == torch.float32
    if config.optimizer_cpu_offload and is_fp32 and config.optimizer_offload_fraction < 1:
        raise ConfigError(
            f"--optimizer-offload-fraction is {config.optimizer_offload_fraction} with --fp32; megatron-core steps no "
            "fp32 parameter that stays on the card; use 1.0, or --bf16."
        )


def _check_sizes(args: Namespace) -> None:
    tensor = args.tensor_model_parallel_size
    expert_tensor = args.expert_tensor_parallel_size or tensor
    for size, divisor in (
        ("ffn_hidden_size", tensor),
        ("moe_ffn_hidden_size", expert_tensor if args.num_experts else 1),
        ("moe_shared_expert_intermediate_size", tensor if args.num_experts else 1),
        ("num_experts", args.expert_model_parallel_size),
    ):
        value = vars(args)[size] or 0
        if value % divisor:
            ranks = "--expert-model-parallel-size" if size == "num_experts" else "--tensor-model-parallel-size"
            if size == "moe_ffn_hidden_size":
                ranks = "--expert-tensor-parallel-size"
            raise ConfigError(f"{flag_of(size)} is {value}; {ranks} {divisor} must divide it.")
    heads, groups = args.num_attention_heads, args.num_query_groups
    if heads % groups:
        raise ConfigError(f"--num-query-groups is {groups}; it must divide --num-attention-heads {heads}.")


def check_expert_layout(sizes: ParallelSizes, num_experts: int | None) -> None:
    """Check that expert, expert-tensor and pipeline parallelism divide the number of GPUs.

    Raises:
        ConfigError: names the sizes and their product.
    """
    expert_size = sizes.expert_tensor * sizes.expert * sizes.pipeline
    if (num_experts or sizes.expert > 1) and sizes.world % expert_size:
        raise ConfigError(
            f"The trainer has {sizes.world} GPUs; --expert-tensor-parallel-size {sizes.expert_tensor} (default: the "
            f"tensor-parallel size) x --expert-model-parallel-size {sizes.expert} x "
            f"--pipeline-model-parallel-size {sizes.pipeline} = {expert_size} must divide that; change one of the "
            "sizes, or --actor-num-nodes and --actor-num-gpus-per-node."
        )


def _check_schedule(args: Namespace) -> None:
    """Check rates and weight decay, and the lengths of warm-up and decay if the flags give the length of the run."""
    for flag, rate in (("--min-lr", args.min_lr), ("--lr-warmup-init", args.lr_warmup_init)):
        if rate > args.lr:
            raise ConfigError(f"{flag} is {rate:g}, above the peak of the learning rate, --lr {args.lr:g}; lower it.")
    start, end = args.start_weight_decay, args.end_weight_decay
    if end < start or (end > start and args.weight_decay_incr_style == "constant"):
        raise ConfigError(
            f"--start-weight-decay is {start:g} and --end-weight-decay {end:g} with --weight-decay-incr-style "
            f"{args.weight_decay_incr_style}: constant needs equal ones, linear and cosine only grow."
        )
    sizes = (args.num_rollout, args.rollout_batch_size, args.n_samples_per_prompt)
    steps = max(math.prod(sizes) // args.global_batch_size, 1) if all(sizes) and args.global_batch_size else None
    if decay := args.lr_decay_iters or steps:
        warmup_steps(decay, args.lr_warmup_iters, args.lr_warmup_fraction)


def _check_pipeline(split: PipelineSplit, group_size: int) -> None:
    if split.virtual > 1 and group_size < split.stages:
        raise ConfigError(
            f"--microbatch-group-size-per-vp-stage is {group_size}; it must be at least "
            f"--pipeline-model-parallel-size {split.stages}, its default."
        )
    if split.layout is not None:
        return
    ends = {"--decoder-first-pipeline-num-layers": split.first, "--decoder-last-pipeline-num-layers": split.last}
    given = {flag: count for flag, count in ends.items() if count is not None}
    rest = split.num_layers + split.embedding_counts + split.loss_counts - sum(given.values())
    others = (split.stages - len(given)) * split.virtual
    if rest < 0 or (rest % others if others else rest):
        said = "".join(f", {flag} {count}" for flag, count in given.items())
        raise ConfigError(
            f"--num-layers is {split.num_layers}{said}: {rest} layers (embedding and loss included where they count) "
            f"are left for {others} pipeline stages (--pipeline-model-parallel-size {split.stages}, virtual ones "
            f"included), which must divide them; give other numbers for {' or '.join(ends)}."
        )


def _check_batch(samples: int, batch: BatchConfig, sizes: ParallelSizes, group_size: int) -> None:
    ranks = sizes.data
    if samples < ranks:
        raise ConfigError(
            f"--global-batch-size {samples} is less than the {ranks} data-parallel ranks ({sizes.world} GPUs / "
            f"model parallelism), and every rank needs a sample in each step; use at least {ranks}, or raise "
            "--tensor-model-parallel-size, --pipeline-model-parallel-size or --context-parallel-size."
        )
    if batch.use_dynamic_batch_size:
        return
    size = batch.micro_batch_size
    multiple = ranks * (group_size if sizes.virtual > 1 else 1)
    count = -(-samples // size)
    if count % multiple:
        raise ConfigError(
            f"--global-batch-size {samples} makes {count} micro-batches of --micro-batch-size {size}, no multiple of "
            f"{multiple} (data-parallel ranks, times the virtual-pipeline group); use --use-dynamic-batch-size, or a "
            f"--global-batch-size that is a multiple of {multiple * size}."
        )


def _check_experts(args: Namespace) -> None:
    kinds = args.moe_router_load_balancing_type
    if args.use_routing_replay:
        flag = "--use-rollout-routing-replay" if args.use_rollout_routing_replay else "--use-routing-replay"
        if not args.num_experts:
            raise ConfigError(
                f"{flag} replays the choice of experts, and the model has none (--num-experts); drop it."
            )
        if "sinkhorn" in kinds:
            raise ConfigError(
                f"{flag} chooses the experts of single tokens; --moe-router-load-balancing-type sinkhorn assigns them "
                "to a batch as a whole; choose another one, or drop the replay."
            )
    if not args.num_experts:
        return
    shared = args.moe_shared_expert_intermediate_size
    if args.add_bias_linear and shared:
        raise ConfigError(
            f"--moe-shared-expert-intermediate-size is {shared}, and shared experts have no biases here; add "
            "--disable-bias-linear for a model without biases."
        )
    _check_layers(args.moe_layer_freq, args.num_layers)
    topk, num_experts = args.moe_router_topk, args.num_experts
    if not 1 <= topk <= num_experts:
        raise ConfigError(f"--moe-router-topk is {topk}; it must be from 1 to --num-experts {num_experts}.")
    groups, chosen = args.moe_router_num_groups, args.moe_router_group_topk
    if chosen and groups and (chosen > topk or chosen * (num_experts // groups) < topk):
        raise ConfigError(
            f"--moe-router-topk is {topk}; the --moe-router-group-topk {chosen} chosen groups have "
            f"{num_experts // groups} experts each; they must have as many together, and not be more."
        )
    coefficients = args.moe_aux_loss_coeff
    if "global_aux_loss" in kinds and any(coefficients if isinstance(coefficients, list) else [coefficients]):
        raise ConfigError(
            "--moe-router-load-balancing-type global_aux_loss takes all ranks to have equally many tokens; packed "
            "micro-batches have not; use seq_aux_loss or aux_loss, or --moe-aux-loss-coeff 0."
        )


def _check_layers(frequency: int | list[int], num_layers: int) -> None:
    if isinstance(frequency, int):
        if frequency < 1:
            raise ConfigError(
                f"--moe-layer-freq is {frequency}; it must be at least 1, or a list with 0 or 1 per layer."
            )
        return
    if len(frequency) != num_layers:
        raise ConfigError(
            f"--moe-layer-freq has {len(frequency)} entries; --num-layers is {num_layers}; give one per layer."
        )
    if set(frequency) - {0, 1}:
        raise ConfigError(f"--moe-layer-freq has entries {sorted(set(frequency))}; 1 is experts, 0 a dense layer.")


def _check_attention(config: TransformerConfig) -> None:
    """Raise ConfigError for options of megatron-core's attention that packed attention does not support."""
    window, softmax = config.window_size, config.softmax_type
    if softmax == "learnable" and config.multi_latent_attention:
        softmax = "learnable, with --multi-latent-attention"
    for flag, value, allowed in (
        ("--attention-dropout", config.attention_dropout, 0),
        ("--window-size", window, window if window is None or (window[0] >= 0 and window[1] == 0) else "LEFT,0"),
        ("--softmax-type", softmax, "learnable" if softmax == "learnable" else "vanilla"),
        ("--qk-clip", config.qk_clip, False),
        ("--log-max-attention-logit", config.log_max_attention_logit, False),
    ):
        if value != allowed:
            raise ConfigError(f"{flag} is {value}; packed attention has no such option; it must be {allowed}.")


_SIZES = {
    # attribute of args -> default of megatron-core's flag
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def _check_linear_attention(args: Namespace) -> None:
    """Check the gates' sharding and the number of layers; layers of ``--spec`` check their sizes themselves."""
    if args.attention_output_gate and args.tensor_model_parallel_size > args.num_query_groups:
        raise ConfigError(
            f"--tensor-model-parallel-size is {args.tensor_model_parallel_size} with --attention-output-gate and "
            f"--num-query-groups {args.num_query_groups}; megatron-core does not cut the gates of one group over "
            f"ranks; use at most {args.num_query_groups}, and more of --context-parallel-size or pipeline stages."
        )
    if args.linear_attention_freq is None:
        changed = [flag_of(key) for key, default in _SIZES.items() if vars(args)[key] != default]
        if changed:
            raise ConfigError(
                f"{', '.join(changed)} without --linear-attention-freq: no layer has linear attention; give it too."
            )
        return
    if not args.spec and not args.custom_model_provider_path:
        specs = sorted({f.spec for f in all_families().values() if f.has_linear_attention})
        raise ConfigError(
            f"--linear-attention-freq is {args.linear_attention_freq} without --spec; the standard layers have no "
            f"linear attention; give --spec {' or '.join(specs)}."
        )
    frequency = args.linear_attention_freq
    is_short = frequency < 1 if isinstance(frequency, int) else len(frequency) != args.num_layers
    if is_short:
        raise ConfigError(
            f"--linear-attention-freq is {frequency}; it must be at least 1, or a list with 1 (linear) or 0 for each "
            f"of the {args.num_layers} layers."
        )
