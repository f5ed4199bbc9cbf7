"""Every config field of megatron-core that is a flag: who reads it here, or what happens to it instead.

A field can be set and read by nobody: large parts of megatron-core act only inside TransformerEngine's layers,
Megatron-FSDP, inference or Mamba, none of which this trainer builds.  Accepting
such a flag in silence would be a lie, so each field stands in exactly one of three tables:

* :data:`READERS`: the module that reads it, of megatron-core (relative to ``megatron.core``) or of slime,
* :data:`WITHOUT_EFFECT`: only speed or memory would differ; the flag is reset and one log line says what happens,
* :data:`REFUSED`: results or promises would differ; an error.

tests/contracts/test_megatron_fields.py holds the tables against the sources of both.  TransformerEngine being
installed changes nothing here: the layers are slime's own (what megatron-core itself takes from it, such as its fused
Adam, needs no flag).
"""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

from slime.backends.megatron_utils.flags.config_flags import (
    CONFIG_CLASSES,
    DEFAULTS,
    attribute_of,
    config_fields,
    default_of,
)
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

_SLIME = "slime.backends.megatron_utils"

_FIELDS_OF_READER: dict[str, tuple[str, ...]] = {
    # slime's own modules
    f"{_SLIME}.initialize": (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
        *("context_parallel_size", "hierarchical_context_parallel_sizes", "expert_model_parallel_size"),
        *("expert_tensor_parallel_size", "num_distributed_optimizer_instances", "deterministic_mode"),
    ),
    f"{_SLIME}.model_provider": ("rotary_base", "rotary_percent"),
    f"{_SLIME}.layers.value_head": ("init_method_std",),
    f"{_SLIME}.layers.attention": (
        *("softmax_type", "kv_channels", "attention_dropout", "window_size", "attention_backend"),
        *("qk_clip", "log_max_attention_logit", "rotary_interleaved", "no_rope_freq"),
    ),
    f"{_SLIME}.layers.norm": ("normalization", "layernorm_zero_centered_gamma"),
    f"{_SLIME}.layers.layer_specs": ("qk_layernorm", "moe_layer_freq", "multi_latent_attention", "num_moe_experts"),
    f"{_SLIME}.layers.latent_attention": (
        *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "softmax_scale"),
    ),
    f"{_SLIME}.layers.rotary": (
        *("rope_type", "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim"),
    ),
    f"{_SLIME}.flags.sparse_arguments": (
        *("experimental_attention_variant", "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
        *("dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss"),
    ),
    f"{_SLIME}.flags.linear_arguments": (
        *("linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads"),
    ),
    f"{_SLIME}.layers.experts": (
        *("moe_grouped_gemm", "moe_ffn_hidden_size", "moe_apply_probs_on_input", "glu_linear_offset"),
        *("activation_func_clamp_value", "activation_func_fp8_input_store", "gated_linear_unit"),
    ),
    f"{_SLIME}.layers.token_dispatcher": (
        *("moe_shared_expert_overlap", "moe_expert_capacity_factor"),
        "moe_token_dispatcher_type",
    ),
    f"{_SLIME}.flags.resolve_arguments": ("moe_enable_deepep", "transformer_impl", "overlap_p2p_comm"),
    f"{_SLIME}.model": ("min_lr", "bf16", "fp16", "optimizer"),
    f"{_SLIME}.train_step": ("overlap_grad_reduce", "overlap_param_gather", "align_param_gather"),
    # megatron-core
    "transformer.transformer_config": (
        "embedding_init_method_std",
        "num_query_groups",
        "moe_router_topk_limited_devices",
    ),
    "config_logger": ("config_logger_dir",),
    "tensor_parallel.layers": ("perform_initialization", "use_cpu_initialization", "sequence_parallel"),
    "pipeline_parallel.schedules": (
        *("enable_autocast", "overlap_p2p_comm_warmup_flush"),
        "microbatch_group_size_per_vp_stage",
    ),
    "pipeline_parallel.p2p_communication": ("batch_p2p_sync",),
    "transformer.transformer_block": (
        *("num_layers", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
        *("pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split"),
        *("account_for_loss_in_pipeline_split", "recompute_granularity", "recompute_method", "recompute_num_layers"),
        *("recompute_modules", "distribute_saved_activations"),
    ),
    "transformer.transformer_layer": ("hidden_size", "hidden_dropout", "layernorm_epsilon", "bias_dropout_fusion"),
    "transformer.attention": ("num_attention_heads", "add_qkv_bias", "attention_output_gate", "test_mode"),
    "transformer.mlp": ("ffn_hidden_size", "add_bias_linear", "bias_activation_fusion"),
    "models.common.embeddings.language_model_embedding": (
        *("fp32_residual_connection", "clone_scatter_output_in_embedding"),
    ),
    "models.gpt.gpt_model": ("mrope_section",),
    "transformer.moe.moe_layer": ("moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
    "transformer.moe.router": (
        *("moe_router_load_balancing_type", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk"),
        *("moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_score_function", "moe_router_dtype"),
        *("moe_router_enable_expert_bias", "moe_router_force_load_balancing", "moe_aux_loss_coeff"),
        *("moe_z_loss_coeff", "moe_input_jitter_eps", "moe_pad_expert_input_to_capacity", "moe_token_drop_policy"),
    ),
    "transformer.moe.token_dispatcher": (
        *("moe_flex_dispatcher_backend", "moe_deepep_num_sms", "moe_hybridep_num_sms"),
    ),
    "distributed.finalize_model_grads": ("moe_router_bias_update_rate",),
    "optimizer": (
        *("decoupled_lr", "decoupled_min_lr", "weight_decay", "apply_wd_to_qk_layernorm", "adam_beta1", "adam_beta2"),
        *("adam_eps", "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window"),
        *("hysteresis", "optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"),
        *("use_torch_optimizer_for_cpu_offload", "pin_cpu_grads", "pin_cpu_params", "use_distributed_optimizer"),
        "overlap_param_gather_with_optimizer_step",
    ),
    "distributed.distributed_data_parallel": ("grad_reduce_in_fp32", "bucket_size", "nccl_ub"),
    "distributed.param_and_grad_buffer": (
        *("check_for_nan_in_grad", "check_for_large_grads", "pad_buckets_for_high_nccl_busbw"),
        *("reduce_scatter_with_fp32_accumulation", "average_in_collective", "disable_symmetric_registration"),
    ),
}

READERS: dict[str, str] = {name: module for module, names in _FIELDS_OF_READER.items() for name in names}
"""Field -> module that reads it."""

_OVERLAP = "tensor-parallel communication is not overlapped with matrix products"
_PRECISION = "optimizer states and main parameters are fp32"

WITHOUT_EFFECT: dict[str, str] = {
    "moe_permute_fusion": "tokens are moved by gathers of slime's own",
    "moe_use_legacy_grouped_gemm": "experts are grouped by torch's own product (--moe-grouped-gemm)",
    "moe_router_fusion": "the router is plain torch",
    "apply_rope_fusion": "rotary embeddings are slime's own",
    "fused_single_qkv_rope": "rotary embeddings are slime's own",
    "gradient_accumulation_fusion": "gradients are accumulated by plain torch",
    "persist_layer_norm": "the norm is slime's own",
    "memory_efficient_layer_norm": "the norm is slime's own",
    "masked_softmax_fusion": "attention is slime's own",
    "attention_softmax_in_fp32": "the softmax of attention is always computed in fp32",
    "cp_comm_type": "context-parallel ranks gather keys and values",
    "cross_entropy_loss_fusion": "log-probs have kernels of slime's own",
    "cross_entropy_fusion_impl": "log-probs have kernels of slime's own",
    "use_te_rng_tracker": "random states are Megatron's own",
    "use_te_activation_func": "activations are plain torch",
    "barrier_with_L1_time": "there are no Megatron timers, so there is nothing to wait for",
    **dict.fromkeys(
        (
            *("tp_comm_overlap", "tp_comm_bulk_wgrad", "tp_comm_bulk_dgrad", "tp_comm_overlap_ag"),
            *("tp_comm_overlap_rs", "tp_comm_overlap_rs_dgrad", "tp_comm_split_ag", "tp_comm_atomic_ag"),
            *("tp_comm_split_rs", "tp_comm_atomic_rs", "tp_comm_overlap_disable_qkv"),
            *("tp_comm_overlap_disable_fc1", "tp_comm_bootstrap_backend"),
        ),
        _OVERLAP,
    ),
    **dict.fromkeys(
        (
            *("use_precision_aware_optimizer", "store_param_remainders", "main_grads_dtype", "main_params_dtype"),
            *("exp_avg_dtype", "exp_avg_sq_dtype"),
        ),
        _PRECISION,
    ),
    **dict.fromkeys(
        (
            *("fp8_recipe", "fp8_margin", "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo"),
            *("fp8_wgrad", "fp8_dot_product_attention", "fp8_multi_head_attention", "tp_only_amax_red"),
            *("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "fp4_recipe"),
        ),
        "parameters and products are not quantized",
    ),
}
"""Field -> what happens instead of what its flag asks for."""

_FP8 = "training in fp8 or fp4 needs TransformerEngine's layers, which slime has not"
_OFFLOAD = "offloading of activations needs TransformerEngine's layers; use --recompute-granularity"
_DELAY = "delayed weight gradients need TransformerEngine's layers"
_MUON = "the optimizer is Adam"
_QK_CLIP = "packed attention does not clip its logits"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("fp8", "fp8_param", "fp8_quantizer_factory", "fp8_param_gather", "fp4", "fp4_param"),
            *("fp4_quantizer_factory", "use_kitchen", "use_kitchen_attention", "kitchen_attention_backend"),
            *("disable_parameter_transpose_cache", "reuse_grad_buf_for_mxfp8_param_ag"),
            *("moe_router_padding_for_quantization", "moe_router_padding_for_fp8"),
        ),
        _FP8,
    ),
    **dict.fromkeys(
        (
            *("cpu_offloading", "cpu_offloading_num_layers", "cpu_offloading_activations", "cpu_offloading_weights"),
            *("cpu_offloading_double_buffering", "fine_grained_activation_offloading", "offload_modules"),
            "min_offloaded_tensor_size",
        ),
        _OFFLOAD,
    ),
    **dict.fromkeys(
        (
            *("delay_wgrad_compute", "ep_overlap_early_attn_memory_release", "defer_embedding_wgrad_compute"),
            "wgrad_deferral_limit",
        ),
        _DELAY,
    ),
    **dict.fromkeys(
        (
            *("muon_momentum", "muon_split_qkv", "muon_use_nesterov", "muon_scale_mode", "muon_fp32_matmul_prec"),
            *("muon_num_ns_steps", "muon_tp_mode", "muon_extra_scale_factor", "sgd_momentum"),
        ),
        _MUON,
    ),
    **dict.fromkeys(("qk_clip_alpha", "qk_clip_threshold"), _QK_CLIP),
    **dict.fromkeys(
        ("max_seqlen_per_dp_cp_rank", "hybrid_context_parallel"),
        "micro-batches are packed by --max-tokens-per-gpu, for one context-parallel size",
    ),
    "pipeline_model_parallel_comm_backend": "pipeline stages use the backend of all other groups",
    "num_microbatches_with_partial_activation_checkpoints": "a layer recomputes in every micro-batch or in none; "
    "--recompute-method block with --recompute-num-layers chooses the layers",
    "overlap_moe_expert_parallel_comm": "its schedule takes layers of TransformerEngine apart",
    "use_ring_exchange_p2p": "it needs a torch of NVIDIA's own",
    "apply_residual_connection_post_layernorm": "the layers take the residual before the norm",
    "window_attn_skip_freq": "packed attention has no window",
    "qk_l2_norm": "there is no such norm of queries and keys; --qk-layernorm is the learned one",
    "apply_query_key_layer_scaling": "packed attention scales all layers alike",
    "disable_bf16_reduced_precision_matmul": "nobody acts on it",
    "init_model_with_meta_device": "parameters are made where they stay",
    "use_fused_weighted_squared_relu": "experts are gated by SiLU or GELU",
    "batch_invariant_mode": "there are no batch-invariant kernels here",
    "moe_enable_routing_replay": "slime has its own: --use-routing-replay",
    "moe_per_layer_logging": "the balancing losses are not logged by layer",
    "moe_latent_size": "experts work on the whole hidden size",
    "log_num_zeros_in_grad": "zeros are not counted",
    "gradient_reduce_div_fusion": "it is a choice of Megatron-FSDP",
}
"""Field -> why its flag cannot be given."""


def reset_what_has_no_effect(args: Namespace) -> dict[str, Any]:
    """Return defaults for the given flags of :data:`WITHOUT_EFFECT`; log one line for each reason."""
    derived: dict[str, Any] = {}
    flags_of_reason: dict[str, list[str]] = {}
    for name, default in _given(args):
        if name in WITHOUT_EFFECT:
            derived[attribute_of(name)] = default
            flags_of_reason.setdefault(WITHOUT_EFFECT[name], []).append(_flag(args, name))
    for reason, flags in flags_of_reason.items():
        logger.info("%s: without effect here; %s.", ", ".join(flags), reason)
    return derived


def refuse_what_nobody_reads(args: Namespace) -> None:
    """Raise for flags of :data:`REFUSED` that were given.

    Raises:
        ConfigError: one line for each.
    """
    lines = [
        f"{_flag(args, name)} is given: {REFUSED[name]}; leave it out." for name, _ in _given(args) if name in REFUSED
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def _given(args: Namespace) -> list[tuple[str, Any]]:
    """Return fields of the last two tables whose flag has another value than its default, with the default."""
    defaults: dict[str, Any] = {}
    for config_class in CONFIG_CLASSES:
        for field, _ in config_fields(config_class):
            if field.name in WITHOUT_EFFECT or field.name in REFUSED:
                # where several classes have the field, its flag has the default of the first
                defaults.setdefault(field.name, DEFAULTS.get(attribute_of(field.name), default_of(field)))
    return [(name, default) for name, default in defaults.items() if vars(args)[attribute_of(name)] != default]


def _flag(args: Namespace, name: str) -> str:
    """Return the flag as it was meant: with ``--no-`` where a switch that is on was turned off."""
    word = attribute_of(name).replace("_", "-")
    return f"--no-{word}" if vars(args)[attribute_of(name)] is False else f"--{word}"
