"""The clipped policy-gradient surrogate of PPO, with one loss per response token.

Shapes: T = response tokens of the micro-batch on this rank, samples concatenated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.algorithms.policy_losses.inputs import ClipConfig, PolicyLossInputs, TokenLosses

__all__ = ["ClipConfig", "clipped_policy_loss", "ppo_clip"]


def ppo_clip(inputs: PolicyLossInputs, clip: ClipConfig) -> TokenLosses:
    """Compute ``clipped_policy_loss`` with one ratio per token."""
    log_ratio_T = inputs.log_ratio_T
    return TokenLosses(*clipped_policy_loss(log_ratio_T, inputs.advantage_T, clip), log_ratio_T)


def clipped_policy_loss(log_ratio_T: Tensor, advantage_T: Tensor, clip: ClipConfig) -> tuple[Tensor, Tensor]:
    """Return PPO's pessimistic surrogate, to be minimized:

        loss = max(-rho * A, -clamp(rho, 1 - low, 1 + high) * A),    rho = exp(log_ratio)

    With ``clip.dual``, the loss of tokens with A < 0 is at most ``-dual * A``.

    Args:
        log_ratio_T: log pi_new(token) - log pi_old(token), in nats. Carries the gradient.
        advantage_T: Advantage of each token; constant with respect to the policy.
        clip: The trust region.

    Returns:
        ``(loss_T, clipped_T)``: the loss of each token, and 1.0 where the clamp of rho set it (the dual clip does not
        count).

    Source: PPO, arXiv:1707.06347, eq. 7. Asymmetric bounds: DAPO, arXiv:2503.14476, sec. 3.1.
        Dual clip: Ye et al., arXiv:1912.09729.
    """
    ratio_T = log_ratio_T.exp()
    loss_T = -ratio_T * advantage_T
    bounded_T = -ratio_T.clamp(1 - clip.low, 1 + clip.high) * advantage_T
    clipped_T = (bounded_T > loss_T).float()
    loss_T = torch.maximum(loss_T, bounded_T)
    if clip.dual is not None:
        ceiling_T = -clip.dual * advantage_T
        loss_T = torch.where(advantage_T < 0, torch.minimum(loss_T, ceiling_T), loss_T)
    return loss_T, clipped_T
