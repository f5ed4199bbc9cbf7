"""When the policy's log-probs before training need a separate forward pass."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils import forward
from slime.backends.megatron_utils.forward import needs_old_log_probs, readers_of_old_log_probs
from tests.flag_values import args_with


def plain(**overrides: Any) -> Namespace:
    """GRPO with one optimizer step per rollout, where training's first forward pass suffices."""
    return args_with(**{"use_routing_replay": False} | overrides)


KEEPS_IT_SKIPPED = [
    {},
    {"use_tis": True},
    {"use_opsm": True},
    {"use_kl_loss": True, "use_unbiased_kl": True},
    {"normalize_advantages": True},
    {"advantage_estimator": "cispo"},
    {"advantage_estimator": "reinforce_plus_plus"},
    {"advantage_estimator": "reinforce_plus_plus_baseline"},
    {"advantage_estimator": "examples.custom_estimator.rloo.rloo"},
    {"use_routing_replay": True, "use_rollout_routing_replay": True},
    {"custom_reward_post_process_path": "a.b"},
    {"recompute_loss_function": True},
]

NEEDS_IT = [
    {"kl_coef": 0.1},
    {"advantage_terms": ["an extension: it reads them"]},
    {"advantage_estimator": "ppo"},
    {"advantage_estimator": "gspo"},
    {"custom_advantage_function_path": "a.b"},
    {"keep_old_actor": True},
    {"get_mismatch_metrics": True},
    {"loss_type": "custom_loss"},
    {"loss_type": "sft_loss"},
    {"use_routing_replay": True},
    {"use_rollout_entropy": True},
]


def needed(overrides: dict[str, Any], num_steps: int = 1) -> bool:
    return needs_old_log_probs(plain(**overrides), num_steps)


@pytest.mark.parametrize("overrides", KEEPS_IT_SKIPPED, ids=str)
def test_one_step_and_nobody_who_reads_them_before_it_leaves_the_pass_out(overrides):
    assert not needed(overrides)
    assert needed(overrides, num_steps=2), "a second step compares with the policy before the first"


@pytest.mark.parametrize("overrides", NEEDS_IT, ids=str)
def test_the_pass_is_made_for_each_of_its_readers(overrides):
    assert needed(overrides)
    assert len(list(readers_of_old_log_probs(plain(**overrides), 1))) == 1


def test_with_the_engines_log_probs_only_a_comparison_with_the_trainers_or_the_entropy_needs_it():
    engine = {"use_rollout_logprobs": True}
    for overrides in (*KEEPS_IT_SKIPPED, *NEEDS_IT):
        if not overrides.keys() & {"use_tis", "get_mismatch_metrics", "use_rollout_entropy"}:
            assert not needed(engine | overrides, num_steps=3)
    assert needed(engine | {"get_mismatch_metrics": True})
    assert needed(engine | {"use_rollout_entropy": True})
    assert needed(engine | {"use_rs": True}), "MIS that rejects without weights"


def record_mode(args: Namespace, model: list[torch.nn.Module], store_prefix: str) -> None:
    args.seen.append((store_prefix, [chunk.training for chunk in model]))


def test_the_hook_before_log_probs_finds_the_model_in_evaluation_mode(monkeypatch):
    monkeypatch.setattr(forward, "packing_of", lambda args: None)
    monkeypatch.setattr(forward.mpu, "is_pipeline_last_stage", lambda: False)
    path = f"{__name__}.{record_mode.__name__}"
    args = Namespace(custom_megatron_before_log_prob_hook_path=path, rollout_top_p=1.0, seen=[])
    chunks = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1).eval()]
    forward.forward_only(lambda: None, args, chunks, [], [], "ref_")
    assert args.seen == [("ref_", [False, False])]
    assert [chunk.training for chunk in chunks] == [True, False]
