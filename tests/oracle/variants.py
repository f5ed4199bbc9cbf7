"""What is compared with the reference: losses, packings and ways to split the work, by name."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from torch import Tensor

from slime.train_data.model_dims import ModelDims
from tests.oracle.batches import VOCABULARY, bigram_policy, random_examples
from tests.oracle.reference import Example

COLUMNS = VOCABULARY + 1  # even, so that two shards are equal
ROLLOUTS_PER_STEP = 4
SEEDS = (3, 11)

LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    2: {
        "dp2": {},
        "cp2": {"context_parallel_size": 2},
        "cp2_allgather": {"context_parallel_size": 2},
        "tp2": {"tensor_model_parallel_size": 2},
        "pp2": {"pipeline_model_parallel_size": 2},
        "one": {},
    },
    4: {
        "dp2_cp2": {"context_parallel_size": 2},
        "dp2_cp2_allgather": {"context_parallel_size": 2},
        "cp4": {"context_parallel_size": 4},
        "dp2_tp2": {"tensor_model_parallel_size": 2},
        "tp2_cp2": {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
        "pp2_cp2": {"pipeline_model_parallel_size": 2, "context_parallel_size": 2},
    },
}
"""[processes][name] sizes for Megatron; ``one`` is each process alone."""

FLOPS = ModelDims(
    num_layers=1,
    hidden_size=8,
    num_attention_heads=2,
    num_query_groups=2,
    head_dim=4,
    ffn_hidden_size=16,
    vocab_size=VOCABULARY,
)
PACKINGS: dict[str, dict[str, Any]] = {
    "dynamic": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 50},
    "balanced": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_data": True, "flops": FLOPS},
    "flops": {
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 64,
        "balance_data": True,
        "balance_by_flops": True,
        "flops": FLOPS,
    },
    "static": {"micro_batch_size": 1},
}

PENALTY = {"kl_coef": 0.3, "use_kl_loss": False, "kl_loss_coef": 0.0}
PPO = {"advantage_estimator": "ppo", "gamma": 0.95, "lambd": 0.9, **PENALTY}
ICEPOP = {"use_tis": True, "custom_tis_function_path": "slime.backends.megatron_utils.loss.icepop_function"}
RLOO = "examples.custom_estimator.rloo.rloo"
MIS_SETTINGS: dict[str, Any] = {
    "use_tis": True,
    "tis_mode": "truncate",
    "tis_level": "token",
    "tis_upper_bound": 1.6,
    "tis_lower_bound": None,
    "tis_batch_normalize": False,
    "use_rs": False,
    "rs_level": "token",
    "rs_lower_bound": None,
    "rs_upper_bound": None,
    "rs_veto_threshold": None,
}


def mis(**settings: Any) -> dict[str, Any]:
    """MIS with some settings changed."""
    path = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
    return {"custom_tis_function_path": path, **MIS_SETTINGS, **settings}


VARIANTS: dict[str, dict[str, Any]] = {
    # estimators
    "grpo": {},
    "gspo": {"advantage_estimator": "gspo"},
    "cispo": {"advantage_estimator": "cispo"},
    "ppo": PPO,
    "ppo_plain": {**PPO, "normalize_advantages": False},
    "ppo_monte_carlo": {**PPO, "gamma": 1.0, "lambd": 1.0},
    "reinforce": {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.95, **PENALTY},
    "reinforce_k1": {"advantage_estimator": "reinforce_plus_plus", "gamma": 1.0, **PENALTY, "kl_loss_type": "k1"},
    "baseline": {"advantage_estimator": "reinforce_plus_plus_baseline", **PENALTY},
    "rloo": {"advantage_estimator": RLOO, "normalize_advantages": False},
    "rloo_whitened": {"advantage_estimator": RLOO},
    "dr_grpo": {
        "normalize_advantages": False,
        "grpo_std_normalization": False,
        "custom_pg_loss_reducer_function_path": "tests.oracle.plugins.constant_divisor_reducer",
    },
    "custom_advantage": {
        "custom_advantage_function_path": "tests.oracle.plugins.leave_one_out",
        "normalize_advantages": False,
    },
    "not_whitened": {"normalize_advantages": False},
    "distilled": {"use_opd": True},
    "distilled_plain": {"use_opd": True, "normalize_advantages": False},
    "distilled_engine": {"use_opd": True, "use_rollout_logprobs": True, "normalize_advantages": False},
    "distilled_ppo": {"use_opd": True, **PPO},
    "distilled_baseline": {"use_opd": True, "advantage_estimator": "reinforce_plus_plus_baseline", **PENALTY},
    # normalization
    "per_token": {"calculate_per_token_loss": True},
    "gspo_per_token": {"advantage_estimator": "gspo", "calculate_per_token_loss": True},
    "cispo_per_token": {"advantage_estimator": "cispo", "calculate_per_token_loss": True},
    "ppo_per_token": {**PPO, "calculate_per_token_loss": True},
    "custom_reducer": {"custom_pg_loss_reducer_function_path": "tests.oracle.plugins.constant_divisor_reducer"},
    # losses
    "critic": {**PPO, "loss_type": "value_loss", "normalize_advantages": False},
    "critic_per_token": {
        **PPO,
        "loss_type": "value_loss",
        "normalize_advantages": False,
        "calculate_per_token_loss": True,
    },
    "sft": {"loss_type": "sft_loss"},
    "sft_per_token": {"loss_type": "sft_loss", "calculate_per_token_loss": True},
    "custom_loss": {
        "loss_type": "custom_loss",
        "custom_loss_function_path": "tests.oracle.plugins.squared_log_prob",
    },
    "symmetric_clip": {"eps_clip_high": 0.2},
    "dual_clip": {"eps_clip_c": 1.2},
    "gspo_dual_clip": {"advantage_estimator": "gspo", "eps_clip_c": 1.2},
    "opsm": {"use_opsm": True},
    "opsm_per_token": {"use_opsm": True, "calculate_per_token_loss": True},
    "opsm_gspo": {"use_opsm": True, "advantage_estimator": "gspo"},
    "k1": {"kl_loss_type": "k1"},
    "k2": {"kl_loss_type": "k2"},
    "low_var_kl": {"kl_loss_type": "low_var_kl"},
    "unbiased_k1": {"use_unbiased_kl": True, "kl_loss_type": "k1"},
    "unbiased_k2": {"use_unbiased_kl": True, "kl_loss_type": "k2"},
    "unbiased_k3": {"use_unbiased_kl": True},
    "unbiased_kl": {"use_unbiased_kl": True, "kl_loss_type": "low_var_kl"},
    "engine_log_probs": {"use_rollout_logprobs": True},
    "reused_log_probs": {"reuse_log_probs": True},
    "top_p": {"rollout_top_p": 0.9},
    "recompute": {"recompute_loss_function": True},
    "no_chunks": {"log_probs_chunk_size": -1, "entropy_coef": 0.0},
    # corrections
    "tis": {"use_tis": True},
    "tis_per_token": {"use_tis": True, "calculate_per_token_loss": True},
    "tis_reused": {"use_tis": True, "reuse_log_probs": True},
    "tis_gspo": {"use_tis": True, "advantage_estimator": "gspo"},
    "tis_cispo_opsm": {"use_tis": True, "advantage_estimator": "cispo", "use_opsm": True},
    "icepop": ICEPOP,
    "icepop_per_token": {**ICEPOP, "calculate_per_token_loss": True},
    "mismatch_metrics": {"get_mismatch_metrics": True},
    "mismatch_metrics_engine": {"get_mismatch_metrics": True, "use_rollout_logprobs": True},
    "mis_token": mis(),
    "mis_token_clip": mis(tis_mode="clip", tis_lower_bound=0.8),
    "mis_token_mask": mis(tis_mode="mask"),
    "mis_sequence": mis(tis_level="sequence", tis_mode="clip"),
    "mis_sequence_mask": mis(tis_level="sequence", tis_mode="mask", tis_upper_bound=4.0),
    "mis_geometric": mis(tis_level="geometric", tis_upper_bound=1.05),
    "mis_rejection": mis(use_tis=False, use_rs=True),
    "mis_rejection_sequence": mis(use_rs=True, rs_level="sequence", rs_upper_bound=3.0),
    "mis_rejection_geometric": mis(use_rs=True, rs_level="geometric", rs_lower_bound=0.9, rs_upper_bound=1.1),
    "mis_veto": mis(use_rs=True, rs_lower_bound=0.01, rs_upper_bound=100.0, rs_veto_threshold=0.45),
    "mis_per_token": {**mis(use_rs=True, rs_level="geometric"), "calculate_per_token_loss": True},
    "mis_gspo": {**mis(tis_level="sequence"), "advantage_estimator": "gspo"},
    "mis_normalised": mis(tis_batch_normalize=True),
    "mis_normalised_sequence": mis(tis_batch_normalize=True, tis_level="sequence", use_rs=True),
}
NEEDS_ONE_SAMPLE_A_BATCH = ("mis_normalised", "mis_normalised_sequence")
"""Means over the micro-batch depend on the packing, so these variants use the same packing everywhere."""
GROUP_SIZE = 4
"""Rollouts of one prompt: rollout ids 0 to 3 are the first, 4 to 7 the second."""
CELLS = [
    *((variant, "static" if variant in NEEDS_ONE_SAMPLE_A_BATCH else "dynamic") for variant in VARIANTS),
    *((variant, packing) for packing in ("balanced", "flops", "static") for variant in ("grpo", "per_token", "gspo")),
]

PACKING_OF = {variant: packing for variant, packing in reversed(CELLS)}
"""The first of each variant."""

DEFAULTS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "loss_type": "policy_loss",
    "allgather_cp": False,
    "data_pad_size_multiplier": 4,
    "advantage_estimator": "grpo",
    "calculate_per_token_loss": False,
    "recompute_loss_function": False,
    "rollout_temperature": 0.9,
    "rollout_top_p": 1.0,
    "log_probs_chunk_size": 4,
    "entropy_coef": 0.01,
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "eps_clip_c": None,
    "value_clip": 0.2,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "kl_loss_type": "k3",
    "use_unbiased_kl": False,
    "use_rollout_logprobs": False,
    "reuse_log_probs": False,
    "use_opsm": False,
    "opsm_delta": 0.1,
    "use_tis": False,
    "get_mismatch_metrics": False,
    "tis_clip": 1.8,
    "tis_clip_low": 0.5,
    "custom_tis_function_path": None,
    "custom_pg_loss_reducer_function_path": None,
    "custom_advantage_function_path": None,
    "custom_loss_function_path": None,
    "kl_coef": 0.0,
    "gamma": 1.0,
    "lambd": 1.0,
    "use_opd": False,
    "opd_kl_coef": 0.7,
    "opd_top_k": None,
    "normalize_advantages": True,
    "rewards_normalization": True,
    "grpo_std_normalization": True,
}


def arguments(variant: str) -> Namespace:
    """The trainer's flags of a variant."""
    return Namespace(**{**DEFAULTS, **VARIANTS[variant]})


def problem(args: Namespace, seed: int) -> tuple[list[Example], Tensor]:
    """An even number of samples, and the table: logits with one column of vocabulary padding, or a value."""
    examples = random_examples(seed)
    if len(examples) % 2:
        examples = random_examples(seed + 1000)
    assert len(examples) % 2 == 0
    if args.loss_type == "value_loss":
        return examples, bigram_policy(seed)[:, :1]
    padding = torch.full((VOCABULARY, 1), 2.0, dtype=torch.float64)
    return examples, torch.cat([bigram_policy(seed), padding], dim=1)
