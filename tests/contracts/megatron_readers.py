"""The modules that read the config fields of megatron-core; test_megatron_fields.py holds both against the sources."""

from __future__ import annotations

_SLIME = "slime.backends.megatron_utils"

FIELDS_OF_READER: dict[str, tuple[str, ...]] = {
    # slime's own modules
    f"{_SLIME}.initialize": (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
        *("context_parallel_size", "hierarchical_context_parallel_sizes", "expert_model_parallel_size"),
        *("expert_tensor_parallel_size", "num_distributed_optimizer_instances", "deterministic_mode"),
    ),
    f"{_SLIME}.model_provider": ("rotary_base", "rotary_percent", "fp8"),
    f"{_SLIME}.layers.fp8_linear": (
        *("fp8_recipe", "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    ),
    f"{_SLIME}.layers.value_head": ("init_method_std",),
    f"{_SLIME}.layers.attention": (
        *("softmax_type", "kv_channels", "attention_dropout", "window_size", "window_attn_skip_freq"),
        "attention_backend",
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
    f"{_SLIME}.flags.check_arguments": (
        "optimizer",
        *("experimental_attention_variant", "dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss"),
        *("linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads"),
    ),
    f"{_SLIME}.models.deepseek": ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
    f"{_SLIME}.layers.experts": (
        *("moe_grouped_gemm", "moe_ffn_hidden_size", "moe_apply_probs_on_input", "glu_linear_offset"),
        *("activation_func_clamp_value", "activation_func_fp8_input_store", "gated_linear_unit"),
    ),
    f"{_SLIME}.layers.token_dispatcher": (
        *("moe_shared_expert_overlap", "moe_expert_capacity_factor"),
        "moe_token_dispatcher_type",
    ),
    f"{_SLIME}.flags.resolve_arguments": ("moe_enable_deepep", "transformer_impl", "overlap_p2p_comm"),
    f"{_SLIME}.adam": ("exp_avg_dtype", "exp_avg_sq_dtype"),
    f"{_SLIME}.model": ("min_lr", "bf16", "fp16"),
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
"""Module of megatron-core (relative to ``megatron.core``) or of slime -> the config fields that it reads."""
