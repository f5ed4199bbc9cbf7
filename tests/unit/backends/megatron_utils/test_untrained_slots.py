"""Untrained tokens may hold any values in their columns: loss, metrics and gradient equal those with zeros."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils import loss
from slime.backends.megatron_utils.advantages import compute_advantages_and_returns
from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean
from tests.unit.backends.megatron_utils.megatron_case import parse, start_single_process
from tests.unit.backends.megatron_utils.test_loss import MODEL_FLAGS, make_args, make_batch, make_logits

MASKS = ((1, 0, 1), (0, 1, 1, 0), (0, 0))
LOG_PROBS = [[-1.0, -2.0, -0.5], [-1.5, -0.7, -2.5, -0.3], [-1.0, -1.0]]
COLUMNS: dict[str, tuple[float, ...]] = {
    "advantages": (1.0, -0.5, 2.0, -1.0),
    "log_probs": (-1.2, -0.4, -0.9, -2.0),
    "ref_log_probs": (-1.1, -0.6, -0.8, -2.2),
    "rollout_log_probs": (-1.3, -0.2, -0.9, -2.9),
    "values": (0.1, 0.2, 0.3, 0.4),
    "returns": (1.0, 0.0, 0.5, 0.25),
}
"""Values of the trained tokens, in order."""
ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"
MIS = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
KL = {"use_kl_loss": True, "kl_loss_coef": 0.5}

VARIANTS: dict[str, dict[str, Any]] = {
    "ppo clip": {"entropy_coef": 0.1},
    "dual clip": {"eps_clip_c": 1.1},
    "gspo": {"advantage_estimator": "gspo"},
    "cispo": {"advantage_estimator": "cispo"},
    "opsm": {"use_opsm": True, "opsm_delta": -1.0},
    "k1": {**KL, "kl_loss_type": "k1"},
    "k2": {**KL, "kl_loss_type": "k2"},
    "k3": {**KL, "kl_loss_type": "k3"},
    "unbiased": {**KL, "kl_loss_type": "low_var_kl", "use_unbiased_kl": True},
    "tis": {"use_tis": True},
    "icepop": {"use_tis": True, "custom_tis_function_path": ICEPOP},
    "mis": {"use_tis": True, "custom_tis_function_path": MIS, "tis_level": "sequence", "tis_batch_normalize": True},
    "rejection": {"use_rs": True, "custom_tis_function_path": MIS, "rs_level": "geometric", "rs_veto_threshold": 0.5},
    "engine": {"use_rollout_logprobs": True, "get_mismatch_metrics": True},
    "per token": {"calculate_per_token_loss": True},
    "sft": {"loss_type": "sft_loss"},
    "value": {"loss_type": "value_loss"},
}


@pytest.fixture(scope="module", autouse=True)
def world() -> None:
    start_single_process(parse(*MODEL_FLAGS))


def columns_with(strange: float) -> dict[str, list[list[float]]]:
    filled = {}
    for name, values in COLUMNS.items():
        trained = iter(values)
        filled[name] = [[next(trained) if trains else strange for trains in mask] for mask in MASKS]
    return filled


def outcome(args: Namespace, strange: float) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Loss, metrics, and the gradient with respect to the logits."""
    batch = make_batch(masks=MASKS, **columns_with(strange))
    if args.loss_type == "value_loss":
        logits = torch.linspace(-1, 1, sum(batch["total_lengths"]))[None, :, None].requires_grad_()
    else:
        logits = make_logits(batch, LOG_PROBS)
    lengths = batch["total_lengths"], batch["response_lengths"]
    reducer = get_sum_of_sample_mean(
        *lengths, batch["loss_masks"], batch["rollout_mask_sums"], args.calculate_per_token_loss
    )
    value, metrics = loss.LOSSES[args.loss_type](args, batch, logits, reducer)
    value.backward()
    return value.detach(), metrics, logits.grad


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_metrics_and_gradient_do_not_see_them(name: str, strange: float) -> None:
    args = make_args(**VARIANTS[name])
    plain_value, plain_metrics, plain_gradient = outcome(args, 0.0)
    value, metrics, gradient = outcome(args, strange)
    assert torch.isfinite(plain_value) and torch.isfinite(plain_gradient).all() and plain_gradient.any()
    torch.testing.assert_close(value, plain_value)
    torch.testing.assert_close(gradient, plain_gradient)
    for key, expected in plain_metrics.items():
        torch.testing.assert_close(metrics[key], expected, msg=key)


@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"])
def test_advantages_and_returns_of_trained_tokens_do_not_see_them(estimator: str, strange: float) -> None:
    def trained(filler: float) -> list[torch.Tensor]:
        batch = make_batch(masks=MASKS, **columns_with(filler))
        data = {**batch, "rewards": [1.0, -1.0, 0.5]}
        args = make_args(
            advantage_estimator=estimator, kl_coef=0.1, kl_loss_type="k3", gamma=0.9, lambd=0.9,
            normalize_advantages=True, custom_advantage_function_path=None,
        )  # fmt: skip
        compute_advantages_and_returns(args, data)
        return [
            values[mask != 0]
            for name in ("advantages", "returns", "kl")
            for values, mask in zip(data[name], data["loss_masks"], strict=True)
        ]

    # PPO also sums KL and values of untrained tokens, if they are numbers.
    for values, expected in zip(trained(strange), trained(-1.0 if estimator != "ppo" else strange), strict=True):
        assert torch.isfinite(values).all()
        torch.testing.assert_close(values, expected)
