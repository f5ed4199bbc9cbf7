"""Policy losses, one per file.  Each returns one number per response token, which ``algorithms.reduction`` reduces.

The advantage estimator selects the loss (``Estimator.policy_loss``).  ``opsm`` is not a loss but a mask for any loss.
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
    """A surrogate loss whose gradient is a policy gradient."""

    compute: PolicyLossFunction
    may_reuse_log_probs: bool = True
    """With one optimizer step per rollout, the detached current log-probs may serve as the old log-probs."""


PPO_CLIP = PolicyLoss(compute=ppo_clip)
GSPO = PolicyLoss(compute=gspo, may_reuse_log_probs=False)
CISPO = PolicyLoss(compute=cispo)

POLICY_LOSSES: dict[str, PolicyLoss] = {"ppo_clip": PPO_CLIP, "gspo": GSPO, "cispo": CISPO}
"""Losses by name, for docs and tests."""
