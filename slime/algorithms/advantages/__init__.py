"""Advantage estimators by name: what each computes, what it needs, what it is trained with.

To add one here: a file beside the others with a function of ``AdvantageInputs`` and ``AdvantageConfig``, and a line in
``ESTIMATORS``.  To add one without touching this tree: an ``Estimator`` anywhere on the Python path, named by its
import path (``--advantage-estimator my_package.rloo.rloo``); docs/customization.md does it.  Whitening and what
guides add apply to the result of any of them.
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
    """One way to turn a reward per sample into an advantage per token."""

    compute: Advantages
    """Gives ``(advantages_N, returns_N)``, one entry per response token; knows masked tokens by ``mask_N``."""
    group_baseline: GroupBaseline | None = None
    """The baseline of the rewards that ``compute`` sees; None leaves them as they are."""
    policy_loss: PolicyLoss = PPO_CLIP
    """The surrogate that the advantages go into."""
    needs_whole_responses: bool = False
    """Tokens depend on each other, so context-parallel pieces must be gathered first; else pieces do as well."""
    needs_values: bool = False
    """Needs the critic's values."""
    needs_whitening: bool = False
    """Makes no sense without ``--normalize-advantages``."""
    uses_kl: bool = False
    """Takes ``--kl-coef`` times the KL from the reference off the reward of each token."""
    columns: tuple[str, ...] = ()
    """Columns of the train data that ``compute`` finds in ``AdvantageInputs.columns``."""


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
        ConfigError: the name is unknown; the message lists those there are.
        HookError: an import path does not lead to an ``Estimator``.
    """
    return ESTIMATORS.resolve(name)
