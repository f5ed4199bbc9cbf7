"""Off-policy sequence masking: drop tokens with negative advantage in sequences the policy has moved away from.

Shapes: R = tokens of a whole response, not sliced by context parallelism; N = samples; r = response tokens of a sample
on this rank; T = response tokens of all samples on this rank, concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime.algorithms.policy_losses.gspo import sequence_log_ratio


@torch.no_grad()
def off_policy_sequence_mask(
    log_prob_N: Sequence[Tensor],
    old_log_prob_N: Sequence[Tensor],
    mask_N: Sequence[Tensor],
    advantage_N: Sequence[Tensor],
    *,
    delta: float,
) -> Tensor:
    """Return a mask that is 0 for tokens with A < 0 in sequences whose KL exceeds ``delta``, and 1 otherwise:

        KL = mean over trained tokens of (log pi_old - log pi_new)

    Args:
        log_prob_N: [R] each, under the trained policy.
        old_log_prob_N: [R] each, under the sampling policy.
        mask_N: [R] each, 1 for trained tokens.
        advantage_N: [r] each, advantages of the tokens on this rank (r = R without context parallelism).
        delta: Threshold in nats; ``--opsm-delta``.

    Returns:
        keep_T: 1.0 or 0.0 for each token on this rank.

    Source: DeepSeek-V3.2, arXiv:2512.02556, sec. 3.1.
    """
    kl_N = -sequence_log_ratio(log_prob_N, old_log_prob_N, mask_N)
    keep = [(~((advantage_r < 0) & (kl > delta))).float() for kl, advantage_r in zip(kl_N, advantage_N, strict=True)]
    return torch.cat(keep)
