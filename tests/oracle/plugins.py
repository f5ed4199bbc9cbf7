"""A user's advantage, loss and reducer, as the flags accept them; their plain versions are in ``step``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

TOKENS_OF_A_STEP = 64.0
"""Dr. GRPO's constant: a length that does not depend on the responses."""


def leave_one_out(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """RLOO: the reward minus the mean of the rollout's other samples (arXiv:2402.14740).

    Every rank has the raw rewards of the whole rollout, and its samples' positions in it.
    """
    raw = rollout_data["raw_reward"]
    advantages = []
    for position, template in zip(rollout_data["partition"], rollout_data["kl"], strict=True):
        others = (sum(raw) - raw[position]) / (len(raw) - 1)
        advantages.append(torch.full_like(template, raw[position] - others))
    rollout_data["advantages"] = rollout_data["returns"] = advantages


def constant_divisor_reducer(
    total_lengths: Sequence[int], response_lengths: Sequence[int], loss_masks: Sequence[Tensor], per_token: bool
) -> Callable[[Tensor], Tensor]:
    """Sum over the trained tokens, over a constant."""
    from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean

    constant = [TOKENS_OF_A_STEP] * len(loss_masks)
    return get_sum_of_sample_mean(total_lengths, response_lengths, loss_masks, constant, per_token)


def squared_log_prob(
    args: Namespace, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The square of the log-probability, for each row that predicts a response token."""
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy

    _, found = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    loss = sum_of_sample_mean(torch.cat(found["log_probs"]).square())
    return loss, {"custom": 2 * loss}
