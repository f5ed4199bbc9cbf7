"""PPO: reward at the last token, KL penalty on each token, and generalized advantage estimation with a critic."""

from __future__ import annotations

from torch import Tensor

from slime.algorithms.advantages.inputs import AdvantageConfig, AdvantageInputs, over_trained_tokens, token_rewards
from slime.algorithms.gae import generalised_advantages


@over_trained_tokens
def ppo_advantages(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[list[Tensor], list[Tensor]]:
    """Compute advantages and returns of the trained tokens with ``gae.generalised_advantages``, from the rewards

        r[t] = -kl_coef * kl[t]  + (reward if t is the last trained token)

    Needs whole responses, because tokens depend on all later tokens.

    Source: PPO, arXiv:1707.06347; per-token KL reward: Ouyang et al., arXiv:2203.02155.
    """
    assert inputs.values_N is not None, "ppo needs the critic's values"
    rewards_N = token_rewards(inputs, config)
    return generalised_advantages(rewards_N, inputs.values_N, gamma=config.gamma, lambd=config.lambd)
