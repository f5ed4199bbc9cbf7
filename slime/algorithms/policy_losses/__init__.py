"""Policy losses, one per file; each gives one number per response token, to be reduced by ``algorithms.reduction``.

An advantage estimator says which of them it is trained with (``Estimator.policy_loss``).  ``opsm`` is no loss but a
mask over any of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.algorithms.policy_losses.cispo import cispo
from slime.algorithms.policy_losses.gspo import gspo
from slime.algorithms.policy_losses.inputs import ClipConfig, PolicyLossFunction, PolicyLossInputs, TokenLosses
from slime.algorithms.policy_losses.ppo_clip import ppo_clip

__all__ = [
    "CISPO",
    "GSPO",
    "POLICY_LOSSES",
    "PPO_CLIP",
    "ClipConfig",
    "PolicyLoss",
    "PolicyLossInputs",
    "TokenLosses",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """A surrogate whose gradient is a policy gradient."""

    compute: PolicyLossFunction
    may_reuse_log_probs: bool = True
    """With a single optimizer step per rollout the present log-probs, without gradient, do for the old ones."""


PPO_CLIP = PolicyLoss(compute=ppo_clip)
GSPO = PolicyLoss(compute=gspo, may_reuse_log_probs=False)
CISPO = PolicyLoss(compute=cispo)

POLICY_LOSSES: dict[str, PolicyLoss] = {"ppo_clip": PPO_CLIP, "gspo": GSPO, "cispo": CISPO}
"""By name, for pages and tests."""
