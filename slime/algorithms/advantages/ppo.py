"""PPO: the reward at the end, a KL penalty on each token, and a critic, through generalised advantage estimation."""

from __future__ import annotations

from torch import Tensor

from slime.algorithms.advantages.inputs import AdvantageConfig, AdvantageInputs, over_trained_tokens, token_rewards
from slime.algorithms.gae import generalised_advantages


@over_trained_tokens
def ppo_advantages(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[list[Tensor], list[Tensor]]:
    """Return advantages and returns by ``gae.generalised_advantages`` of the trained tokens' rewards

        r[t] = -kl_coef * kl[t]  + (reward if t is the last trained token)

    Needs whole responses: which context-parallel rank holds the last token depends on the lengths.

    Source: PPO, arXiv:1707.06347; per-token KL reward: Ouyang et al., arXiv:2203.02155.
    """
    assert inputs.values_N is not None, "ppo needs the critic's values"
    rewards_N = token_rewards(inputs, config)
    return generalised_advantages(rewards_N, inputs.values_N, gamma=config.gamma, lambd=config.lambd)
