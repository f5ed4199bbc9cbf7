"""Advantage estimators by name: the function, what it requires, and the policy loss it is trained with.

To add one here, write a file with a function of ``AdvantageInputs`` and ``AdvantageConfig``, and add a line to
``ESTIMATORS``.  To add one without changing slime, define an ``Estimator`` anywhere on the Python path and name it by
its import path (``--advantage-estimator my_package.rloo.rloo``); see docs/customization.md.  Whitening and the terms
that guides add apply to the result of every estimator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.algorithms.advantages.group_relative import group_relative_advantages
from slime.algorithms.advantages.inputs import AdvantageConfig, AdvantageInputs, Advantages
from slime.algorithms.advantages.ppo import ppo_advantages
from slime.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus_advantages
from slime.algorithms.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline_advantages
from slime.algorithms.group_baselines import (
    Baseline,
    GroupBaseline,
    GroupConfig,
    group_mean,
    group_mean_and_std,
)
from slime.algorithms.policy_losses import CISPO, GSPO, PPO_CLIP, PolicyLoss
from slime.algorithms.registry import Registry
from slime.utils.errors import HookError

__all__ = [
    "ESTIMATORS",
    "AdvantageConfig",
    "AdvantageInputs",
    "Baseline",
    "Estimator",
    "GroupConfig",
    "get_estimator",
    "group_relative_advantages",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimator:
    """Converts a reward per sample to an advantage per token."""

    compute: Advantages
    """Returns ``(advantages_N, returns_N)``, one entry per response token, masked tokens included."""
    group_baseline: GroupBaseline | None = None
    """Baseline of the rewards that ``compute`` gets; None passes rewards unchanged."""
    policy_loss: PolicyLoss = PPO_CLIP
    """Surrogate loss that uses the advantages."""
    needs_whole_responses: bool = False
    """Tokens depend on each other, so context-parallel shards of a response must be gathered first."""
    needs_values: bool = False
    """Requires the critic's values."""
    needs_whitening: bool = False
    """Requires ``--normalize-advantages``."""
    uses_kl: bool = False
    """Subtracts ``--kl-coef`` times the KL from the reference from each token's reward."""
    columns: tuple[str, ...] = ()
    """Train data columns that ``compute`` reads from ``AdvantageInputs.columns``."""


def _adopt(path: str, found: Any) -> Estimator:
    if isinstance(found, Estimator):
        return found
    raise HookError(
        f"--advantage-estimator: {path} is a {type(found).__name__}; it must be an Estimator of "
        "slime.algorithms.advantages, as in examples/custom_estimator/rloo.py"
    )


ESTIMATORS: Registry[Estimator] = Registry(
    "--advantage-estimator",
    {
        "grpo": Estimator(compute=group_relative_advantages, group_baseline=group_mean_and_std),
        "gspo": Estimator(compute=group_relative_advantages, group_baseline=group_mean_and_std, policy_loss=GSPO),
        "cispo": Estimator(compute=group_relative_advantages, group_baseline=group_mean_and_std, policy_loss=CISPO),
        "reinforce_plus_plus": Estimator(
            compute=reinforce_plus_plus_advantages, needs_whole_responses=True, needs_whitening=True, uses_kl=True
        ),
        "reinforce_plus_plus_baseline": Estimator(
            compute=reinforce_plus_plus_baseline_advantages,
            group_baseline=group_mean,
            needs_whitening=True,
            uses_kl=True,
        ),
        "ppo": Estimator(compute=ppo_advantages, needs_whole_responses=True, needs_values=True, uses_kl=True),
    },
    adopt=_adopt,
)


def get_estimator(name: str) -> Estimator:
    """Return the estimator of ``--advantage-estimator``.

    Raises:
        ConfigError: the name is unknown; the message lists the known names.
        HookError: an import path does not name an ``Estimator``.
    """
    return ESTIMATORS.resolve(name)
