"""REINFORCE++: discounted returns with the reward at the last token and a KL penalty on each token."""

from __future__ import annotations

from torch import Tensor

from slime.algorithms.advantages.inputs import AdvantageConfig, AdvantageInputs, over_trained_tokens, token_rewards
from slime.algorithms.discounted import ragged_discounted_sums


@over_trained_tokens
def reinforce_plus_plus_advantages(
    inputs: AdvantageInputs, config: AdvantageConfig
) -> tuple[list[Tensor], list[Tensor]]:
    """Compute the return of each trained token, which is also its advantage; ``t + 1`` is the next trained token:

        r[t] = -kl_coef * kl[t]  + (reward if t is the last trained token)
        return[t] = r[t] + gamma * return[t + 1]

    Needs whole responses.  The returns of a sample without trained tokens are 0.

    Source: REINFORCE++, arXiv:2501.03262.
    """
    returns_N = ragged_discounted_sums(token_rewards(inputs, config), config.gamma)
    return list(returns_N), returns_N
