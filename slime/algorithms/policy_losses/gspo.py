"""GSPO: the loss of ``ppo_clip`` with one probability ratio per sequence instead of one per token.

Shapes: R = tokens of a whole response, not sliced by context parallelism; N = samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime.algorithms.policy_losses.inputs import ClipConfig, PolicyLossInputs, TokenLosses
from slime.algorithms.policy_losses.ppo_clip import clipped_policy_loss


def gspo(inputs: PolicyLossInputs, clip: ClipConfig) -> TokenLosses:
    """Compute ``clipped_policy_loss``, with the ratio ``s`` of the whole sequence for each of its tokens:

        s = exp(mean over trained tokens of (log pi_new - log pi_old))

    Source: GSPO, arXiv:2507.18071, sec. 4.1.
    """
    log_ratio_N = sequence_log_ratio(
        inputs.gather(inputs.log_prob_N), inputs.gather(inputs.old_log_prob_N), inputs.mask_N
    )
    log_ratio_T = spread_over_tokens(log_ratio_N, [len(log_prob) for log_prob in inputs.log_prob_N])
    return TokenLosses(*clipped_policy_loss(log_ratio_T, inputs.advantage_T, clip), log_ratio_T)


def masked_sequence_mean(values_N: Sequence[Tensor], mask_N: Sequence[Tensor]) -> Tensor:
    """Return the mean [N] over each sequence's trained tokens; 0 for a sequence without trained tokens."""
    return torch.stack(
        [
            torch.where(mask_R != 0, values_R, 0.0).sum() / mask_R.sum().clamp(min=1)
            for values_R, mask_R in zip(values_N, mask_N, strict=True)
        ]
    )


def sequence_log_ratio(
    log_prob_N: Sequence[Tensor], old_log_prob_N: Sequence[Tensor], mask_N: Sequence[Tensor]
) -> Tensor:
    """Return the log [N] of each sequence's length-normalized probability ratio, in nats:

        log s = mean over trained tokens of (log pi_new - log pi_old)

    Args:
        log_prob_N: [R] each, under the trained policy; carries the gradient.
        old_log_prob_N: [R] each, under the policy at the start of training on the rollout.
        mask_N: [R] each, 1 for trained tokens.

    Source: GSPO, arXiv:2507.18071, sec. 4.1.
    """
    difference_N = [new_R - old_R for new_R, old_R in zip(log_prob_N, old_log_prob_N, strict=True)]
    return masked_sequence_mean(difference_N, mask_N)


def spread_over_tokens(values_N: Tensor, lengths: Sequence[int]) -> Tensor:
    """Repeat each sequence's value for each of its tokens on this rank; returns [T]."""
    length_N = torch.tensor(list(lengths), device=values_N.device)
    return values_N.repeat_interleave(length_N, output_size=sum(lengths))
