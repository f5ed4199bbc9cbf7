"""PPO: the reward at the end, a KL penalty on each token, and a critic, through generalised advantage estimation."""

from __future__ import annotations

from torch import Tensor

from slime.algorithms.advantages.inputs import AdvantageConfig, AdvantageInputs
from slime.algorithms.gae import generalised_advantages


def ppo_advantages(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[list[Tensor], list[Tensor]]:
    """Return advantages and returns by ``gae.generalised_advantages`` of the token rewards

        r[t] = -kl_coef * kl[t]  + (reward if t is the last token of the response)

    Needs whole responses: which context-parallel rank holds the last token depends on the lengths.

    Source: PPO, arXiv:1707.06347; per-token KL reward: Ouyang et al., arXiv:2203.02155.
    """
    assert inputs.values_N is not None, "ppo needs the critic's values"
    token_rewards_N = []
    for reward, kl_R in zip(inputs.rewards_N, inputs.kl_N, strict=True):
        token_rewards_R = -config.kl_coef * kl_R
        token_rewards_R[-1:] += float(reward)
        token_rewards_N.append(token_rewards_R)
    return generalised_advantages(token_rewards_N, inputs.values_N, gamma=config.gamma, lambd=config.lambd)
