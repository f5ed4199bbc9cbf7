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
    local_mask_N: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Which tokens stay in the loss: all but those with A < 0 in a sequence whose KL exceeds ``delta``:

        KL = mean over trained tokens of (log pi_old - log pi_new)

    Args:
        log_prob_N: [R] each, under the policy that is trained.
        old_log_prob_N: [R] each, under the policy that sampled.
        mask_N: [R] each, 1 where a token is trained.
        advantage_N: the advantages of the tokens on this rank, [R] without context parallelism and [r] with it.
        delta: the threshold in nats; ``--opsm-delta``.
        local_mask_N: the part of ``mask_N`` that is on this rank; None without context parallelism.

    Returns:
        ``(keep_T, dropped_fraction)``: 1.0 or 0.0 for each token on this rank, and the sum over samples of the
        fraction of their trained tokens that are on this rank and dropped; summed over context-parallel ranks it
        counts each sample once.

    Source: DeepSeek-V3.2, arXiv:2512.02556, sec. 3.1.
    """
    kl_N = -sequence_log_ratio(log_prob_N, old_log_prob_N, mask_N)
    keep: list[Tensor] = []
    dropped_fraction = kl_N.new_zeros(())
    local_mask_N = mask_N if local_mask_N is None else local_mask_N
    for kl, mask_R, mask_r, advantage_r in zip(kl_N, mask_N, local_mask_N, advantage_N, strict=True):
        is_dropped_r = (advantage_r < 0) & (kl > delta)
        keep.append((~is_dropped_r).float())
        dropped_fraction += (is_dropped_r & (mask_r != 0)).sum() / mask_R.sum().clamp(min=1)
    return torch.cat(keep), dropped_fraction
