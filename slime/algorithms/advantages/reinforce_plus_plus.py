"""REINFORCE++: a KL penalty on each token, the reward at the end, discounted to the start."""

from __future__ import annotations

from torch import Tensor

from slime.algorithms.advantages.inputs import AdvantageConfig, AdvantageInputs, over_trained_tokens, token_rewards
from slime.algorithms.discounted import ragged_discounted_sums


@over_trained_tokens
def reinforce_plus_plus_advantages(
    inputs: AdvantageInputs, config: AdvantageConfig
) -> tuple[list[Tensor], list[Tensor]]:
    """Compute the return of each trained token, which is also its advantage; ``t + 1`` is the next trained one:

        r[t] = -kl_coef * kl[t]  + (reward if t is the last trained token)
        return[t] = r[t] + gamma * return[t + 1]

    Needs whole responses.  A sample without a trained token has nowhere to put its reward: its returns are 0.

    Source: REINFORCE++, arXiv:2501.03262.
    """
    returns_N = ragged_discounted_sums(token_rewards(inputs, config), config.gamma)
    return list(returns_N), returns_N
