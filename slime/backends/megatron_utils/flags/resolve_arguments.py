"""Derived values of the trainer's flags.

:func:`derived_arguments` is pure: it returns the attributes to set, and ``arguments.py`` sets them.
"""

from __future__ import annotations

import importlib.util
import logging
from argparse import Namespace
from typing import Any

from slime.backends.megatron_utils.flags.config_builders import has_yarn, num_stages_of_layout, params_dtype
from slime.backends.megatron_utils.flags.field_table import reset_what_has_no_effect
from slime.backends.megatron_utils.models.flag_rules import YARN_DEFAULTS
from slime.flags.cluster import is_for_cuda
from slime.flags.group import flag_of
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)


def derived_arguments(args: Namespace) -> dict[str, Any]:
    """Return the attributes of ``args`` that follow from the flags.

    Raises:
        ConfigError: a flag that others are derived from is missing or impossible.
    """
    for flag, value in (
        ("--num-layers", args.num_layers),
        ("--hidden-size", args.hidden_size),
        ("--num-attention-heads", args.num_attention_heads),
    ):
        if not value or value < 1:
            raise ConfigError(
                f"{flag} is {value} or not given; the model needs it; give --hf-checkpoint, whose config.json says "
                "it, or source a file of scripts/models."
            )
    if args.lr_warmup_fraction is not None and args.lr_warmup_iters:
        raise ConfigError("--lr-warmup-fraction and --lr-warmup-iters are given; the warm-up has one length.")
    start, end = args.start_weight_decay, args.end_weight_decay
    derived = {
        "start_weight_decay": args.weight_decay if start is None else start,
        "end_weight_decay": args.weight_decay if end is None else end,
        # Checkpoints record these settings of how they are written.
        "use_persistent_ckpt_worker": True,
        "ckpt_assume_constant_structure": True,
        "ckpt_fully_parallel_load": True,
        "ckpt_fully_parallel_save": True,
        "dist_ckpt_save_pre_mcore_014": True,
    }
    asked = [name for name in ("bf16", "fp16", "fp32") if getattr(args, name)]
    in_fp32 = args.accumulate_allreduce_grads_in_fp32
    derived |= _precision(asked, has_cuda=is_for_cuda(args.runs_here), accumulates_in_fp32=in_fp32)
    for derive in (_world, _layout, _shape, _vocabulary, _kernels):
        derived |= derive(args)
    return derived | _rope(args, derived["position_embedding_type"])


def _precision(asked: list[str], *, has_cuda: bool, accumulates_in_fp32: bool) -> dict[str, Any]:
    """Return the run's precision and what follows from it; by default bf16 with CUDA and fp32 without."""
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join('--' + name for name in asked)} are given; a run has one precision.")
    precision = asked[0] if asked else "bf16" if has_cuda else "fp32"
    if precision == "fp16" and not has_cuda:
        raise ConfigError("--fp16 needs CUDA; use --fp32 or --bf16 on CPU.")
    bf16, fp16 = precision == "bf16", precision == "fp16"
    return {
        "bf16": bf16,
        "fp16": fp16,
        "fp32": not (bf16 or fp16),
        "params_dtype": params_dtype(bf16=bf16, fp16=fp16),
        # As in Megatron, gradients of bf16 parameters are accumulated in fp32.
        "accumulate_allreduce_grads_in_fp32": accumulates_in_fp32 or bf16,
    }


def _world(args: Namespace) -> dict[str, Any]:
    """Return the world size of the trainer, and its data-parallel size."""
    # A tool has set world_size; for a job it follows from the flags.
    world_size = vars(args).get("world_size") or args.actor_num_nodes * args.actor_num_gpus_per_node
    model_size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if world_size % model_size:
        raise ConfigError(
            f"The trainer has {world_size} GPUs; --tensor-model-parallel-size {args.tensor_model_parallel_size} x "
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} x --context-parallel-size "
            f"{args.context_parallel_size} = {model_size} must divide that; change --actor-num-nodes, "
            "--actor-num-gpus-per-node or one of the sizes."
        )
    if not args.use_distributed_optimizer:
        logger.info("--no-use-distributed-optimizer: the optimizer is always the distributed one here.")
    return {
        "rank": vars(args).get("rank") or 0,
        "world_size": world_size,
        "data_parallel_size": world_size // model_size,
        "use_distributed_optimizer": True,
        "variable_seq_lengths": True,
    }


def _layout(args: Namespace) -> dict[str, Any]:
    """Return the settings of virtual pipeline stages, sequence parallelism and recomputation."""
    pipeline = args.pipeline_model_parallel_size
    virtual = args.virtual_pipeline_model_parallel_size or args.num_virtual_stages_per_pipeline_rank
    if args.num_layers_per_virtual_pipeline_stage:
        per_rank, rest = divmod(args.num_layers, pipeline)
        if rest or per_rank % args.num_layers_per_virtual_pipeline_stage:
            raise ConfigError(
                f"--num-layers-per-virtual-pipeline-stage is {args.num_layers_per_virtual_pipeline_stage}; it must "
                f"divide the layers of a pipeline rank, {args.num_layers} / {pipeline}."
            )
        virtual = per_rank // args.num_layers_per_virtual_pipeline_stage
    if args.pipeline_model_parallel_layout:
        stages = num_stages_of_layout(args.pipeline_model_parallel_layout)
        if stages % pipeline:
            raise ConfigError(
                f"--pipeline-model-parallel-layout {args.pipeline_model_parallel_layout} has {stages} stages; "
                f"--pipeline-model-parallel-size {pipeline} must divide that."
            )
        virtual = stages // pipeline
    virtual = virtual if virtual and virtual > 1 else None
    if virtual and pipeline == 1:
        raise ConfigError("Virtual pipeline stages need --pipeline-model-parallel-size of at least 2; it is 1.")
    is_tensor_parallel = args.tensor_model_parallel_size > 1
    if is_tensor_parallel and not args.sequence_parallel and (args.num_experts or args.multi_latent_attention):
        logger.info(
            "--sequence-parallel is turned on: with tensor parallelism, megatron-core needs it to train experts and "
            "multi-latent attention correctly."
        )
    sequence_parallel = args.sequence_parallel or bool(args.num_experts) or args.multi_latent_attention
    return {
        "virtual_pipeline_model_parallel_size": virtual,
        "microbatch_group_size_per_vp_stage": args.microbatch_group_size_per_vp_stage or pipeline,
        "overlap_p2p_comm": args.overlap_p2p_comm and virtual is not None,
        "sequence_parallel": sequence_parallel and is_tensor_parallel,
        "recompute_granularity": args.recompute_granularity or ("selective" if args.recompute_activations else None),
    }


def _shape(args: Namespace) -> dict[str, Any]:
    """Return sizes that Megatron derives from others."""
    ffn = args.ffn_hidden_size
    if ffn is None:
        ffn = int(4 * args.hidden_size * 2 / 3) // 64 * 64 if args.swiglu or args.quick_geglu else 4 * args.hidden_size
    if ffn < 1:
        raise ConfigError(f"--ffn-hidden-size is {ffn}; it must be at least 1; give it.")
    if args.num_query_groups is not None and not args.group_query_attention and not args.multi_latent_attention:
        raise ConfigError(
            f"--num-query-groups is {args.num_query_groups} without --group-query-attention; give both or neither."
        )
    kv_channels = args.kv_channels or args.hidden_size // args.num_attention_heads
    seq_length = args.seq_length or 4096
    position_type = args.position_embedding_type
    if args.use_rotary_position_embeddings:
        position_type = "rope"
    elif position_type == "learned_absolute" and not args.add_position_embedding:
        position_type = "none"
    return {
        "ffn_hidden_size": ffn,
        "kv_channels": kv_channels,
        "num_query_groups": args.num_query_groups or args.num_attention_heads,
        "seq_length": seq_length,
        "max_position_embeddings": args.max_position_embeddings or seq_length,
        "position_embedding_type": position_type,
        "attention_output_gate": args.attention_output_gate or args.use_gated_attention,
        "moe_shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size or None,
    }


def _rope(args: Namespace, position_type: str) -> dict[str, Any]:
    """Return defaults for the rotary flags that neither the command nor config.json gave."""
    is_latent = args.multi_latent_attention
    is_yarn = has_yarn(position_type, is_latent=is_latent)
    names = [*YARN_DEFAULTS, *(() if is_latent else ("yarn_truncate",))]
    given = {name: vars(args)[name] for name in names if vars(args)[name] is not None}
    if given and not (is_yarn or is_latent):
        name = next(iter(given))
        raise ConfigError(
            f"{flag_of(name)} is {given[name]} without --multi-latent-attention or --position-embedding-type "
            "yarn, where it has no effect; --use-rope-scaling stretches positions in another way."
        )
    if not (is_yarn or is_latent):
        return {"rope_type": args.rope_type or "rope"}
    values = {**YARN_DEFAULTS, **({"yarn_truncate": True} if is_yarn else {}), **given}
    is_stretched = is_latent and values["rotary_scaling_factor"] != 1.0
    return {**values, "rope_type": args.rope_type or ("yarn" if is_stretched else "rope")}


def _vocabulary(args: Namespace) -> dict[str, Any]:
    """Return the vocabulary size, the size padded for tensor parallelism, and the tokenizer's name."""
    vocab_size = args.vocab_size
    if not vocab_size:
        raise ConfigError("--vocab-size is not given, and no --hf-checkpoint whose config.json tells it; give one.")
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    padded = args.padded_vocab_size or -(-vocab_size // multiple) * multiple
    if padded < vocab_size or padded % args.tensor_model_parallel_size:
        raise ConfigError(
            f"--padded-vocab-size is {padded}; it must be at least --vocab-size {vocab_size} and a multiple of "
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size}."
        )
    return {
        "vocab_size": vocab_size,
        "padded_vocab_size": padded,
        "tokenizer_model": args.tokenizer_model or args.hf_checkpoint,
        "tokenizer_type": args.tokenizer_type or "HuggingFaceTokenizer",
    }


def warmup_steps(decay: float, iters: int, fraction: float | None) -> float:
    """Return the number of optimizer steps of the learning rate's warm-up.

    Args:
        decay: decay steps, including the warm-up.
        iters: ``--lr-warmup-iters``, used if ``fraction`` is None.
        fraction: ``--lr-warmup-fraction``, of the decay steps.

    Raises:
        ConfigError: the warm-up is as long as the whole decay.
    """
    warmup = iters if fraction is None else fraction * decay
    if warmup >= decay:
        raise ConfigError(
            f"The learning rate warms up for {warmup:g} of {decay:g} optimizer steps; lower --lr-warmup-iters or "
            "--lr-warmup-fraction, or raise --lr-decay-iters or --num-rollout."
        )
    return warmup


def _kernels(args: Namespace) -> dict[str, Any]:
    """Return replacements for kernel flags that slime's layers do not support, and log each."""
    derived = reset_what_has_no_effect(vars(args))
    if args.transformer_impl != "local":
        derived["transformer_impl"] = "local"
        logger.info("--transformer-impl %s: the model is built from slime's own layers.", args.transformer_impl)
    has_deepep = importlib.util.find_spec("deep_ep") is not None
    if args.moe_token_dispatcher_type == "allgather":
        derived["moe_token_dispatcher_type"] = "alltoall"
        logger.info(
            "--moe-token-dispatcher-type allgather needs micro-batches of one length; alltoall is used instead."
        )
    if (args.moe_enable_deepep or args.moe_token_dispatcher_type == "flex") and not has_deepep:
        derived |= {"moe_enable_deepep": False, "moe_token_dispatcher_type": "alltoall"}
        logger.info("DeepEP is not installed; experts are reached by --moe-token-dispatcher-type alltoall.")
    if args.optimizer_cpu_offload and not is_for_cuda(args.runs_here):
        derived |= {"optimizer_cpu_offload": False, "overlap_cpu_optimizer_d2h_h2d": False}
        logger.info("--optimizer-cpu-offload: there is no CUDA; the optimizer is on the CPU anyway.")
    return derived
