"""Off-policy sequence masking: drop punished sequences that the policy has already moved away from.

Shapes: R = tokens of a response, whole whatever the context parallelism; N = samples; r = the response tokens of a
sample on this rank; T = those of all samples concatenated.
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
    """Return a mask of the tokens in the loss: all but those with A < 0 in a sequence whose KL exceeds ``delta``:

        KL = mean over trained tokens of (log pi_old - log pi_new)

    Args:
        log_prob_N: [R] each, under the policy that is trained.
        old_log_prob_N: [R] each, under the policy that sampled.
        mask_N: [R] each, 1 where a token is trained.
        advantage_N: the advantages of the tokens on this rank, [R] without context parallelism and [r] with it.
        delta: the threshold in nats; ``--opsm-delta``.

    Returns:
        keep_T: 1.0 or 0.0 for each token on this rank.

    Source: DeepSeek-V3.2, arXiv:2512.02556, sec. 3.1.
    """
    kl_N = -sequence_log_ratio(log_prob_N, old_log_prob_N, mask_N)
    keep = [(~((advantage_r < 0) & (kl > delta))).float() for kl, advantage_r in zip(kl_N, advantage_N, strict=True)]
    return torch.cat(keep)
