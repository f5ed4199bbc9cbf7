"""CISPO: REINFORCE with a clipped, detached importance weight, so that clipping removes no token's gradient.

Shapes: T = response tokens of the micro-batch on this rank, samples concatenated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.algorithms.policy_losses.inputs import ClipConfig, PolicyLossInputs, TokenLosses


def cispo(inputs: PolicyLossInputs, clip: ClipConfig) -> TokenLosses:
    """Compute ``cispo_loss`` for the micro-batch."""
    log_ratio_T = inputs.log_ratio_T
    log_prob_T = torch.cat(list(inputs.log_prob_N))
    return TokenLosses(*cispo_loss(log_ratio_T, log_prob_T, inputs.advantage_T, clip), log_ratio_T)


def cispo_loss(
    log_ratio_T: Tensor, log_prob_T: Tensor, advantage_T: Tensor, clip: ClipConfig
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, to be minimized:

        loss = -stop_gradient(clamp(rho, 1 - low, 1 + high)) * A * log_prob,    rho = exp(log_ratio)

    Args:
        log_ratio_T: log pi_new(token) - log pi_old(token), in nats.
        log_prob_T: log pi_new(token); the only input that carries a gradient.
        advantage_T: Advantage of each token; constant.
        clip: Bounds of the weight; ``dual`` is ignored.

    Returns:
        ``(loss_T, clipped_T)``: the loss, and 1.0 where the clip changed the weight.

    Source: MiniMax-M1, arXiv:2506.13585, sec. 3.1.
    """
    ratio_T = log_ratio_T.detach().exp()
    weight_T = ratio_T.clamp(1 - clip.low, 1 + clip.high)
    return -weight_T * advantage_T * log_prob_T, (weight_T != ratio_T).float()
