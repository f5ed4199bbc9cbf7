"""Public functions have the parameters that plug-ins pass, by the names that plug-ins use."""

from __future__ import annotations

import importlib
import inspect

import pytest

SIGNATURES = {
    "slime.utils.ppo_utils.compute_approx_kl": "log_probs, log_probs_base, kl_loss_type, importance_ratio",
    "slime.utils.ppo_utils.compute_policy_loss": "ppo_kl, advantages, eps_clip, eps_clip_high, eps_clip_c",
    "slime.utils.ppo_utils.compute_cispo_loss": "ppo_kl, log_probs, advantages, eps_clip, eps_clip_high",
    "slime.utils.ppo_utils.get_grpo_returns": "rewards, kl",
    "slime.utils.ppo_utils.get_reinforce_plus_plus_returns": "rewards, kl, loss_masks, response_lengths, "
    "total_lengths, kl_coef, gamma",
    "slime.utils.ppo_utils.chunked_gae": "rewards, values, gamma, lambd, chunk_size",
    "slime.utils.ppo_utils.calculate_log_probs_and_entropy": "logits, tokens, tp_group, with_entropy, chunk_size, "
    "log_prob_keep_mask, with_entropy_grad",
    "slime.backends.megatron_utils.cp_utils.all_gather_with_cp": "tensor, total_length, response_length",
    "slime.backends.megatron_utils.cp_utils.slice_log_prob_with_cp": "log_prob, total_length, response_length",
    "slime.backends.megatron_utils.cp_utils.get_sum_of_sample_mean": "total_lengths, response_lengths, loss_masks, "
    "sample_denoms, calculate_per_token_loss",
    "slime.backends.megatron_utils.cp_utils.slice_with_cp": "tokens, pad_value",
    "slime.backends.megatron_utils.loss.get_log_probs_and_entropy": "logits, args, unconcat_tokens, total_lengths, "
    "response_lengths, with_entropy, non_loss_data, top_p_token_ids, top_p_token_offsets",
    "slime.backends.megatron_utils.loss.policy_loss_function": "args, batch, logits, sum_of_sample_mean",
    "slime.backends.megatron_utils.loss.sft_loss_function": "args, batch, logits, sum_of_sample_mean",
    "slime.backends.megatron_utils.loss.compute_advantages_and_returns": "args, rollout_data",
    "slime.rollout.sglang_rollout.generate_rollout": "args, rollout_id, data_source, evaluation",
    "slime.rollout.sglang_rollout.generate_rollout_async": "args, rollout_id, get_samples",
    "slime.rollout.sglang_rollout.get_model_url": "args, model_name, endpoint",
    "slime.rollout.sglang_rollout.generate": "args, sample, sampling_params",
    "slime.rollout.sglang_rollout.generate_and_rm": "args, sample, sampling_params, evaluation",
    "slime.rollout.sglang_rollout.generate_and_rm_group": "args, group, sampling_params, evaluation",
    "slime.rollout.sglang_rollout.abort": "args, rollout_id",
    "slime.rollout.sglang_rollout._prepare_prompt_ids": "sample, tokenizer, processor",
    "slime.rollout.data_source.pop_first": "args, rollout_id, buffer, num_samples",
    "slime.rollout.rm_hub.remote_rm": "args, sample, max_retries",
    "slime.rollout.rm_hub.compute_score_dapo": "solution_str, ground_truth, strict_box_verify, pause_tokens_index",
    "slime.rollout.rm_hub.compute_gpqa_reward": "response, label, metadata",
    "slime.rollout.filter_hub.base_types.DynamicFilterOutput": "keep, reason, keep_when_insufficient",
    "slime.utils.http_utils.post": "url, payload, max_retries, headers",
    "slime.utils.types.Sample.append_response_tokens": "self, args, tokens, log_probs, trainable, meta_info, text, "
    "update_terminal_info",
    "slime.utils.data.Dataset": "path, tokenizer, processor, max_length, prompt_key, multimodal_keys, label_key, "
    "tool_key, metadata_key, seed, apply_chat_template, apply_chat_template_kwargs",
    "slime.observability.trace_utils.trace_span": "target, name, attrs, record_error",
    "slime.observability.trace_utils.trace_event": "target, name, attrs",
    "slime.observability.logging_utils.log": "args, metrics, step_key",
}
"""Import path -> parameters, in order.  Our functions may have more at the end, if those have defaults."""


@pytest.mark.parametrize("path", SIGNATURES)
def test_parameters_have_their_documented_names(path: str) -> None:
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            target = importlib.import_module(".".join(parts[:cut]))
            break
        except ModuleNotFoundError:
            continue
    for name in parts[cut:]:
        target = getattr(target, name)
    parameters = list(inspect.signature(target).parameters.values())
    wanted = SIGNATURES[path].split(", ")
    assert [p.name for p in parameters[: len(wanted)]] == wanted
    extra = [p for p in parameters[len(wanted) :] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    assert all(p.default is not p.empty for p in extra)
