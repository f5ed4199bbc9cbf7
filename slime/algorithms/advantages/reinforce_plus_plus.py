"""REINFORCE++: a KL penalty on each token, the reward at the end, discounted to the start."""

from __future__ import annotations

import torch
from torch import Tensor

from slime.algorithms.advantages.inputs import AdvantageConfig, AdvantageInputs
from slime.algorithms.discounted import ragged_discounted_sums


def reinforce_plus_plus_advantages(
    inputs: AdvantageInputs, config: AdvantageConfig
) -> tuple[list[Tensor], list[Tensor]]:
    """Compute the return of each token, which is also its advantage:

        r[t] = -kl_coef * kl[t] * mask[t]  + (reward if t is the last trained token)
        return[t] = r[t] + gamma * return[t + 1]

    Needs whole responses.  A sample without a trained token has nowhere to put its reward: its returns are 0.

    Source: REINFORCE++, arXiv:2501.03262.
    """
    token_rewards_N = []
    for position, (reward, kl_R) in enumerate(zip(inputs.rewards_N, inputs.kl_N, strict=True)):
        mask_R = torch.ones_like(kl_R) if inputs.mask_N is None else inputs.mask_N[position].to(kl_R.dtype)
        token_rewards_R = torch.where(mask_R != 0, -config.kl_coef * kl_R * mask_R, 0.0)
        trained = mask_R.nonzero().flatten()
        if len(trained):
            token_rewards_R[trained[-1]] += float(reward)
        token_rewards_N.append(token_rewards_R)
    returns_N = ragged_discounted_sums(token_rewards_N, config.gamma)
    return list(returns_N), returns_N
