"""Checks of the trainer's complete flags: the layout, the pipeline's cut, batches, kernels, the schedule."""

from __future__ import annotations

import importlib
import math
from argparse import Namespace
from typing import Any

from slime.backends.megatron_utils.flags.attention_arguments import check_linear_flags, check_sparse_flags
from slime.backends.megatron_utils.flags.config_builders import (
    ddp_config_from_args,
    num_layers_of_layout,
    optimizer_config_from_args,
    transformer_config_from_args,
)
from slime.backends.megatron_utils.flags.field_table import has_narrow_moments, refuse_what_nobody_reads
from slime.backends.megatron_utils.flags.resolve_arguments import warmup_and_decay_steps
from slime.backends.megatron_utils.layers.attention import check_attention_config
from slime.backends.megatron_utils.layers.fp8_linear import check_fp8_flags
from slime.backends.megatron_utils.model_provider import load_spec
from slime.utils.errors import ConfigError

_MAY_GIVE_OTHER_COUNTS = (
    "custom_generate_function_path",
    "custom_convert_samples_to_train_data_path",
    "load_debug_rollout_data",
    "load_forge_rollout_data",
)
"""With one of these a rollout may have another number of samples than the flags say."""


def check_arguments(args: Namespace) -> None:
    """Refuse combinations that cannot work; ``args`` are complete.

    Raises:
        ConfigError: with the flags, their values and what is allowed.
    """
    _check_kernels(args)
    _check_layout(args)
    _check_pipeline(args)
    _check_batch(args)
    _check_schedule(args)
    _check_experts(args)
    check_sparse_flags(args)
    check_linear_flags(args)
    check_fp8_flags(args)
    config = transformer_config_from_args(args)
    check_attention_config(config)
    if args.spec:
        _check_spec(args, config)
    optimizer_config_from_args(args)
    ddp_config_from_args(args)


def _check_spec(args: Namespace, config: Any) -> None:
    """Load the spec; its module's ``check_stages(args, config)``, when it has one, judges the pipeline's cut now."""
    load_spec(args.spec)
    check_stages = getattr(importlib.import_module(args.spec[0]), "check_stages", None)
    if check_stages is not None:
        check_stages(args, config)


def _check_kernels(args: Namespace) -> None:
    refuse_what_nobody_reads(args)
    if args.optimizer != "adam":
        raise ConfigError(
            f"--optimizer is {args.optimizer!r}; megatron-core's distributed optimizer, which is always on here, "
            "shards Adam only; use adam (which is AdamW)."
        )
    if args.optimizer_cpu_offload and args.use_stateless_adam:
        raise ConfigError(
            "--optimizer-cpu-offload moves Adam's moments to the host, and --use-stateless-adam has none; drop one."
        )
    if has_narrow_moments(args):
        _check_narrow_moments(args)
    if args.optimizer_cpu_offload and args.fp32 and args.optimizer_offload_fraction < 1:
        raise ConfigError(
            f"--optimizer-offload-fraction is {args.optimizer_offload_fraction} with --fp32; megatron-core steps no "
            "fp32 parameter that stays on the card; use 1.0, or --bf16."
        )
    if args.only_train_params_name_list and args.freeze_params_name_list:
        raise ConfigError(
            "--only-train-params-name-list and --freeze-params-name-list are given; they exclude each other."
        )


def _check_narrow_moments(args: Namespace) -> None:
    given = f"--exp-avg-dtype {args.exp_avg_dtype}, --exp-avg-sq-dtype {args.exp_avg_sq_dtype}"
    if not args.use_precision_aware_optimizer:
        raise ConfigError(f"{given}: moments below fp32 need --use-precision-aware-optimizer; add it.")
    if args.optimizer_cpu_offload:
        raise ConfigError(f"{given}: moments on the host are fp32; drop these, or --optimizer-cpu-offload.")
    if args.use_stateless_adam:
        raise ConfigError(f"{given}: --use-stateless-adam has no moments; drop one.")


def _check_layout(args: Namespace) -> None:
    tensor = args.tensor_model_parallel_size
    divided = {"--num-attention-heads": args.num_attention_heads, "--ffn-hidden-size": args.ffn_hidden_size}
    for flag, value in divided.items():
        if value % tensor:
            raise ConfigError(f"{flag} is {value}; --tensor-model-parallel-size {tensor} must divide it.")
    groups = args.num_query_groups
    if args.num_attention_heads % groups:
        raise ConfigError(
            f"--num-query-groups is {groups}; it must divide --num-attention-heads {args.num_attention_heads}."
        )
    if groups % tensor and tensor % groups:
        raise ConfigError(
            f"--num-query-groups is {groups}; --tensor-model-parallel-size {tensor} must divide it or be a multiple."
        )
    if args.num_experts and args.num_experts % args.expert_model_parallel_size:
        raise ConfigError(
            f"--num-experts is {args.num_experts}; --expert-model-parallel-size {args.expert_model_parallel_size} "
            "must divide it."
        )
    if not args.num_experts and args.expert_model_parallel_size > 1:
        raise ConfigError("--expert-model-parallel-size is above 1, but the model has no --num-experts.")
    check_expert_layout(args)


def check_expert_layout(args: Namespace) -> None:
    """Refuse groups of experts that do not divide the trainer; ``args.world_size`` is known.

    Raises:
        ConfigError: with the sizes and their product.
    """
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    expert_tensor = args.expert_tensor_parallel_size or tensor
    expert_size = expert_tensor * args.expert_model_parallel_size * pipeline
    if (args.num_experts or args.expert_model_parallel_size > 1) and args.world_size % expert_size:
        raise ConfigError(
            f"The trainer has {args.world_size} GPUs; --expert-tensor-parallel-size {expert_tensor} (default: the "
            f"tensor-parallel size) x --expert-model-parallel-size {args.expert_model_parallel_size} x "
            f"--pipeline-model-parallel-size {pipeline} = {expert_size} must divide that; change one of the sizes, or "
            "--actor-num-nodes and --actor-num-gpus-per-node."
        )


def _check_schedule(args: Namespace) -> None:
    """Check rates and weight decay; also the lengths of warm-up and decay, where flags say how long the run is."""
    for flag, rate in (("--min-lr", args.min_lr), ("--lr-warmup-init", args.lr_warmup_init)):
        if rate > args.lr:
            raise ConfigError(f"{flag} is {rate:g}, above the peak of the learning rate, --lr {args.lr:g}; lower it.")
    start, end = args.start_weight_decay, args.end_weight_decay
    if end < start or (end > start and args.weight_decay_incr_style == "constant"):
        raise ConfigError(
            f"--start-weight-decay is {start:g} and --end-weight-decay {end:g} with --weight-decay-incr-style "
            f"{args.weight_decay_incr_style}: constant needs equal ones, linear and cosine only grow."
        )
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        raise ConfigError("--lr-decay-style WSD needs --lr-wsd-decay-iters, the steps of its last phase.")
    sizes = (args.num_rollout, args.rollout_batch_size, args.n_samples_per_prompt)
    if all(sizes) and args.global_batch_size:
        warmup_and_decay_steps(args, max(math.prod(sizes) // args.global_batch_size, 1))
    elif args.lr_decay_iters:
        warmup_and_decay_steps(args, args.lr_decay_iters)


def _check_pipeline(args: Namespace) -> None:
    stages = args.pipeline_model_parallel_size
    group_size = args.microbatch_group_size_per_vp_stage
    if args.virtual_pipeline_model_parallel_size and group_size < stages:
        raise ConfigError(
            f"--microbatch-group-size-per-vp-stage is {group_size}; it must be at least "
            f"--pipeline-model-parallel-size {stages}, its default."
        )
    uneven = [args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers]
    if stages == 1 and any(count is not None for count in uneven):
        raise ConfigError(
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers need "
            "--pipeline-model-parallel-size of at least 2; it is 1."
        )
    if args.pipeline_model_parallel_layout is not None:
        _check_layout_string(args)
    elif all(count is None for count in uneven):
        _check_even_split(args)
    else:
        _check_middle(args)


def _check_even_split(args: Namespace) -> None:
    stages = args.pipeline_model_parallel_size * (args.virtual_pipeline_model_parallel_size or 1)
    counted = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    if (args.num_layers + counted) % stages:
        also = f" and the {counted} that count as layers" if counted else ""
        raise ConfigError(
            f"--num-layers is {args.num_layers}; the {stages} pipeline stages must divide it{also}, or give "
            "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers."
        )


def _check_middle(args: Namespace) -> None:
    """Check that stages without a number of layers of their own share the rest evenly."""
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    middle_stages = args.pipeline_model_parallel_size - (first is not None) - (last is not None)
    rest = args.num_layers - (first or 0) - (last or 0)
    said = " and ".join(
        f"--decoder-{end}-pipeline-num-layers {count}"
        for end, count in (("first", first), ("last", last))
        if count is not None
    )
    if rest < 0 or (middle_stages == 0 and rest):
        raise ConfigError(
            f"--num-layers is {args.num_layers}; {said} {'leave' if rest > 0 else 'take'} {abs(rest)} layers "
            f"{'that no stage has' if rest > 0 else 'more than there are'}: with --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size} they must sum to {args.num_layers}."
        )
    parts = middle_stages * (args.virtual_pipeline_model_parallel_size or 1)
    if parts and (rest % parts or rest < parts):
        raise ConfigError(
            f"--num-layers is {args.num_layers}; {said} leave {rest} layers for the other {middle_stages} "
            f"stages{' and their virtual stages' if parts != middle_stages else ''}, which must divide "
            f"evenly{_nearest_last(args, rest, middle_stages)}."
        )


def _nearest_last(args: Namespace, rest: int, middle_stages: int) -> str:
    """Return a last stage with which it comes out even, in words; nothing when there is none."""
    last = args.decoder_last_pipeline_num_layers
    if args.virtual_pipeline_model_parallel_size or last is None:
        return ""
    candidates = [
        other
        for other in range(1, rest + last)
        if (rest + last - other) % middle_stages == 0 and rest + last - other >= middle_stages
    ]
    if not candidates:
        return ""
    best = min(candidates, key=lambda other: abs(other - last))
    return f", as they would with --decoder-last-pipeline-num-layers {best}"


def _check_layout_string(args: Namespace) -> None:
    layers = num_layers_of_layout(args.pipeline_model_parallel_layout)
    if layers != args.num_layers:
        raise ConfigError(
            f"--pipeline-model-parallel-layout {args.pipeline_model_parallel_layout!r} has {layers} decoder layers "
            f"(t); the model has --num-layers {args.num_layers}."
        )


def _check_batch(args: Namespace) -> None:
    if not args.global_batch_size or any(getattr(args, name) for name in _MAY_GIVE_OTHER_COUNTS):
        return
    samples, ranks = args.global_batch_size, args.data_parallel_size
    if samples < ranks:
        raise ConfigError(
            f"--global-batch-size {samples} is less than the {ranks} data-parallel ranks ({args.world_size} GPUs / "
            f"model parallelism), and every rank needs a sample in each step; use at least {ranks}, or raise "
            "--tensor-model-parallel-size, --pipeline-model-parallel-size or --context-parallel-size."
        )
    if args.use_dynamic_batch_size:
        return
    size = args.micro_batch_size
    multiple = ranks * (args.microbatch_group_size_per_vp_stage if args.virtual_pipeline_model_parallel_size else 1)
    count = -(-samples // size)
    if count % multiple:
        raise ConfigError(
            f"--global-batch-size {samples} makes {count} micro-batches of --micro-batch-size {size}, no multiple of "
            f"{multiple} (data-parallel ranks, times the virtual-pipeline group); use --use-dynamic-batch-size, or a "
            f"--global-batch-size that is a multiple of {multiple * size}."
        )


def _check_experts(args: Namespace) -> None:
    _check_replay(args)
    if not args.num_experts:
        return
    if args.add_bias_linear:
        _check_biases(args)
    _check_layers(args)
    _check_choice(args)
    _check_sizes(args)
    kinds = args.moe_router_load_balancing_type
    coefficients = args.moe_aux_loss_coeff
    if "global_aux_loss" in kinds and any(coefficients if isinstance(coefficients, list) else [coefficients]):
        raise ConfigError(
            "--moe-router-load-balancing-type global_aux_loss takes all ranks to have equally many tokens; packed "
            "micro-batches have not; use seq_aux_loss or aux_loss, or --moe-aux-loss-coeff 0."
        )


def _check_biases(args: Namespace) -> None:
    parts = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    for flag, value, allowed in (
        ("--expert-tensor-parallel-size", parts, 1),
        ("--moe-shared-expert-intermediate-size", args.moe_shared_expert_intermediate_size or 0, 0),
    ):
        if value != allowed:
            raise ConfigError(
                f"{flag} is {value}, and experts have biases; it must be {allowed} then; set it, or add "
                "--disable-bias-linear for a model without biases."
            )


def _check_replay(args: Namespace) -> None:
    if not args.use_routing_replay:
        return
    flag = "--use-rollout-routing-replay" if args.use_rollout_routing_replay else "--use-routing-replay"
    if not args.num_experts:
        raise ConfigError(f"{flag} replays the choice of experts, and the model has none (--num-experts); drop it.")
    if "sinkhorn" in args.moe_router_load_balancing_type:
        raise ConfigError(
            f"{flag} chooses the experts of single tokens; --moe-router-load-balancing-type sinkhorn assigns them to "
            "a batch as a whole; choose another one, or drop the replay."
        )


def _check_layers(args: Namespace) -> None:
    frequency = args.moe_layer_freq
    if isinstance(frequency, int):
        if frequency < 1:
            raise ConfigError(
                f"--moe-layer-freq is {frequency}; it must be at least 1, or a list with 0 or 1 per layer."
            )
        return
    if len(frequency) != args.num_layers:
        raise ConfigError(
            f"--moe-layer-freq has {len(frequency)} entries; --num-layers is {args.num_layers}; give one per layer."
        )
    if set(frequency) - {0, 1}:
        raise ConfigError(f"--moe-layer-freq has entries {sorted(set(frequency))}; 1 is experts, 0 a dense layer.")


def _check_choice(args: Namespace) -> None:
    topk, num_experts = args.moe_router_topk, args.num_experts
    if not 1 <= topk <= num_experts:
        raise ConfigError(f"--moe-router-topk is {topk}; it must be from 1 to --num-experts {num_experts}.")
    groups, chosen = args.moe_router_num_groups, args.moe_router_group_topk
    if not chosen:
        return
    if not groups or num_experts % groups or not 1 <= chosen <= groups:
        raise ConfigError(
            f"--moe-router-group-topk is {chosen} of --moe-router-num-groups {groups}; the groups must divide "
            f"--num-experts {num_experts}, and no more can be chosen than there are."
        )
    if chosen > topk or chosen * (num_experts // groups) < topk:
        raise ConfigError(
            f"--moe-router-topk is {topk}; the --moe-router-group-topk {chosen} chosen groups have "
            f"{num_experts // groups} experts each; they must have as many together, and not be more."
        )


def _check_sizes(args: Namespace) -> None:
    parts = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    ffn = args.moe_ffn_hidden_size or args.ffn_hidden_size
    if ffn % parts:
        raise ConfigError(f"--moe-ffn-hidden-size is {ffn}; --expert-tensor-parallel-size {parts} must divide it.")
    shared = args.moe_shared_expert_intermediate_size
    if shared and shared % args.tensor_model_parallel_size:
        raise ConfigError(
            f"--moe-shared-expert-intermediate-size is {shared}; --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size} must divide it."
        )
