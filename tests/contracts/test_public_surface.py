"""The names that code written for slime imports: each can be imported from where it always was.

Modules that need a backend's library are imported like the others: this test runs with everything installed.
"""

from __future__ import annotations

import importlib
import inspect

import pytest

PUBLIC: dict[str, str] = {
    "slime.utils.types": "Sample ParamInfo RolloutBatch MultimodalType MultimodalTypes",
    "slime.utils.misc": "load_function SingletonMeta exec_command decode_int32_meta_array Box group_by "
    "get_current_node_ip get_free_port should_run_periodic_action",
    "slime.utils.http_utils": "post get init_http_client get_rollout_num_engines get_host_info find_available_port "
    "is_port_available",
    "slime.utils.async_utils": "run get_async_loop",
    "slime.utils.processing_utils": "load_tokenizer load_processor build_processor_kwargs process_vision_info "
    "encode_image_for_rollout_engine DEFAULT_PATCH_SIZE",
    "slime.utils.mask_utils": "MultiTurnLossMaskGenerator get_response_lengths",
    "slime.utils.data": "Dataset get_source read_file",
    "slime.utils.eval_config": "EvalDatasetConfig build_eval_dataset_configs ensure_dataset_list",
    "slime.utils.arguments": "parse_args get_slime_extra_args_provider reset_arg slime_validate_args "
    "parse_megatron_role_args",
    "slime.utils.memory_utils": "clear_memory available_memory print_memory",
    "slime.utils.accelerator": "device_type current_device device_count set_device synchronize empty_cache "
    "is_available memory_allocated memory_reserved mem_get_info",
    "slime.utils.ppo_utils": "compute_approx_kl compute_policy_loss compute_cispo_loss compute_opsm_mask "
    "compute_gspo_kl get_grpo_returns get_reinforce_plus_plus_returns get_reinforce_plus_plus_baseline_advantages "
    "get_advantages_and_returns_batch vanilla_gae chunked_gae chunked_discounted_returns "
    "calculate_log_probs_and_entropy",
    "slime.utils.external_utils.command_utils": "exec_command convert_checkpoint hf_download_dataset rsync_simple "
    "fp8_cast_bf16 execute_train ExecuteTrainConfig get_default_wandb_args create_run_id get_bool_env_var "
    "get_env_enable_infinite_run save_to_temp_file check_has_nvlink repo_base_dir NUM_GPUS_OF_HARDWARE dataclass_cli",
    "slime.rollout.base_types": "RolloutFnTrainOutput RolloutFnEvalOutput call_rollout_fn",
    "slime.rollout.data_source": "DataSource RolloutDataSource RolloutDataSourceWithBuffer pop_first",
    "slime.rollout.sglang_rollout": "generate_rollout get_model_url GenerateState generate generate_and_rm "
    "generate_and_rm_group generate_rollout_async eval_rollout eval_rollout_single_dataset abort _prepare_prompt_ids "
    "load_function",
    "slime.rollout.sft_rollout": "generate_rollout",
    "slime.rollout.sleep_rollout": "sleep",
    "slime.rollout.fully_async_rollout": "generate_rollout_fully_async AsyncRolloutWorker",
    "slime.rollout.sglang_streaming_rollout": "generate_streaming",
    "slime.rollout.on_policy_distillation": "reward_func post_process_rewards",
    "slime.rollout.forge_load": "generate_rollout",
    "slime.rollout.sample_hooks": "apply_rollout_sample_hooks set_current_rollout_id",
    "slime.rollout.rm_hub": "async_rm batched_async_rm remote_rm grade_answer_verl get_deepscaler_rule_based_reward "
    "f1_score compute_gpqa_reward compute_score_dapo extract_boxed_answer",
    "slime.rollout.rm_hub.math_utils": "extract_answer extract_boxed_answer grade_answer_verl grade_answer_mathd "
    "grade_answer_sympy last_boxed_only_string remove_boxed mathd_normalize_answer",
    "slime.rollout.rm_hub.math_dapo_utils": "compute_score verify is_correct_minerva is_correct_strict_box "
    "normalize_final_answer",
    "slime.rollout.rm_hub.f1": "f1_score normalize_answer",
    "slime.rollout.rm_hub.gpqa": "compute_gpqa_reward DEFAULT_VALID_LETTERS",
    "slime.rollout.rm_hub.ifbench": "compute_ifbench_reward",
    "slime.rollout.filter_hub.base_types": "DynamicFilterOutput call_dynamic_filter "
    "should_drop_dynamic_filter_output MetricGatherer",
    "slime.rollout.filter_hub.dynamic_sampling_filters": "check_reward_nonzero_std "
    "check_reward_nonzero_std_with_fallback",
    "slime.observability.trace_utils": "trace_span trace_event trace_function bind_trace bind_trace_carrier "
    "export_trace import_trace trace_next_attempt build_sglang_meta_trace_attrs TRACE_CHILDREN_KEY",
    "slime.observability.logging_utils": "log configure_logger init_tracking finish_tracking",
    "slime.observability.metric_utils": "dict_add_prefix compute_pass_rate compute_statistics compute_rollout_step "
    "has_repetition compression_ratio",
    "slime.observability.rollout_metrics": "compute_metrics_from_samples compute_perf_metrics_from_samples",
    "slime.observability.timer": "Timer timer",
    "slime.observability.tensorboard_utils": "_TensorboardAdapter",
    "slime.backends.megatron_utils.cp_utils": "all_gather_with_cp slice_log_prob_with_cp get_sum_of_sample_mean "
    "get_logits_and_tokens_offset_with_cp slice_with_cp",
    "slime.backends.megatron_utils.loss": "get_log_probs_and_entropy get_values policy_loss_function "
    "value_loss_function sft_loss_function vanilla_tis_function icepop_function compute_advantages_and_returns",
    "slime.backends.megatron_utils.megatron_to_hf": "convert_to_hf",
    "slime.agent.adapters": "AnthropicAdapter BaseAdapter OpenAIAdapter",
    "slime.agent.adapters.common": "TurnRecord Session Reply flatten_content tool_call_dict manager_finish_reason "
    "sid_from_bearer sid_from_body call_sglang_generate BaseAdapter",
    "slime.agent.trajectory": "TrajectoryManager",
    "slime.agent.parsing": "parse_model_output ParsedModelOutput parse_tool_uses parse_xml_tool_uses",
    "slime.agent.sandbox": "Sandbox E2BSandbox exec_and_wait ensure_agent_user EXIT_TIME_BUDGET_EXCEEDED ExecResult "
    "FileContent",
    "slime.agent.harness": "BaseHarness HarnessContext ClaudeCodeHarness CodexHarness",
    "slime.agent.harness.common": "BaseHarness run_agent install_npm_cli install_node22 SingletonABCMeta",
    "slime.agent.aiohttp_threaded": "run_app_in_thread AppHandle FilteredAccessLogger",
    "slime.ray.rollout": "RolloutManager",
    "slime.ray.placement_group": "create_placement_groups create_rollout_manager create_training_models",
    "slime_plugins.models.hf_attention": "HuggingfaceAttention",
    "slime.ray.actor_group": "RayTrainGroup",
}
"""Module -> the names that must be there."""

SIGNATURES: dict[str, tuple[str, ...]] = {
    "slime.rollout.sglang_rollout.generate_rollout": ("args", "rollout_id", "data_source", "evaluation"),
    "slime.rollout.sglang_rollout.generate": ("args", "sample", "sampling_params"),
    "slime.rollout.sglang_rollout.generate_and_rm": ("args", "sample", "sampling_params", "evaluation"),
    "slime.rollout.sglang_rollout.generate_and_rm_group": ("args", "group", "sampling_params", "evaluation"),
    "slime.rollout.sglang_rollout.get_model_url": ("args", "model_name", "endpoint"),
    "slime.rollout.sft_rollout.generate_rollout": ("args", "rollout_id", "data_buffer", "evaluation"),
    "slime.rollout.data_source.pop_first": ("args", "rollout_id", "buffer", "num_samples"),
    "slime.utils.arguments.parse_args": ("add_custom_arguments",),
    "slime.utils.misc.should_run_periodic_action": (
        "rollout_id",
        "interval",
        "num_rollout_per_epoch",
        "num_rollout",
    ),
    "slime.utils.http_utils.post": ("url", "payload", "max_retries", "headers"),
    "slime.utils.arguments.parse_megatron_role_args": ("args", "megatron_config_path", "role"),
    "slime.ray.placement_group.create_placement_groups": ("args",),
    "slime.ray.placement_group.create_rollout_manager": ("args", "pg"),
    "slime.ray.placement_group.create_training_models": ("args", "pgs", "rollout_manager"),
    "slime.utils.memory_utils.clear_memory": ("clear_host_memory",),
    "slime.utils.memory_utils.print_memory": ("msg", "clear_before_print"),
    "slime_plugins.models.hf_attention.HuggingfaceAttention": ("args", "config", "layer_number", "cp_comm_type"),
    "slime.observability.logging_utils.log": ("args", "metrics", "step_key"),
    "slime.agent.adapters.common.call_sglang_generate": ("prompt_ids", "session", "body", "adapter", "session_id"),
    "slime.agent.adapters.common.manager_finish_reason": ("tool_uses", "raw_finish"),
    "slime.agent.adapters.common.Reply": ("manager_message", "finish_reason", "wire"),
    "slime.agent.adapters.common.TurnRecord": ("prompt_ids", "output_ids", "finish_reason", "output_log_probs"),
    "slime.agent.adapters.common.tool_call_dict": ("name", "arguments"),
    "slime.agent.harness.HarnessContext": ("workdir", "session_id", "adapter_url", "model_label"),
    "slime.agent.harness.common.run_agent": ("sb", "workdir", "start_cmd", "env", "time_budget_sec"),
    "slime.agent.harness.common.install_npm_cli": ("sb", "node_runtime", "npm_package", "check_cmd"),
    "slime.agent.parsing.parse_tool_uses": ("text", "tools_schema", "tool_parser_name"),
    "slime.agent.parsing.parse_xml_tool_uses": ("text", "tools_schema"),
    "slime.backends.megatron_utils.cp_utils.all_gather_with_cp": ("tensor", "total_length", "response_length"),
}
"""Function -> the parameters it must have, in this order; more may follow."""


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_can_be_imported(module):
    loaded = importlib.import_module(module)
    assert [name for name in PUBLIC[module].split() if not hasattr(loaded, name)] == []


@pytest.mark.parametrize("path", SIGNATURES)
def test_public_signatures_hold(path):
    module, name = path.rsplit(".", 1)
    parameters = tuple(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    assert parameters[: len(SIGNATURES[path])] == SIGNATURES[path]


def test_the_fields_of_a_sample_are_upstreams_in_upstreams_order():
    from dataclasses import fields

    from slime.utils.types import Sample

    names = """group_index index rollout_id prompt tokens multimodal_inputs multimodal_train_inputs
    multimodal_train_input_id apply_chat_template_kwargs response response_length label reward loss_mask
    weight_versions rollout_log_probs rollout_top_p_token_ids rollout_top_p_token_offsets rollout_routed_experts
    remove_sample teacher_log_probs status metadata generate_function_path custom_rm_path train_metadata session_id
    non_generation_time spec_info prefix_cache_info""".split()
    assert [field.name for field in fields(Sample)][: len(names)] == names
