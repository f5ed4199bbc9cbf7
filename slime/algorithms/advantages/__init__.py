"""Advantage estimators: name -> function and what it needs.

To add one: a file beside the others with a function of ``AdvantageInputs`` and ``AdvantageConfig``, and a line in
``ESTIMATORS``.  Whitening and distillation apply to the result of any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from slime.algorithms.advantages.group_relative import group_relative_advantages
from slime.algorithms.advantages.inputs import AdvantageConfig, AdvantageInputs
from slime.algorithms.advantages.ppo import ppo_advantages
from slime.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus_advantages
from slime.algorithms.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline_advantages
from slime.utils.errors import ConfigError

__all__ = ["ESTIMATORS", "AdvantageConfig", "AdvantageInputs", "Estimator", "get_estimator"]


@dataclass(frozen=True, slots=True)
class Estimator:
    """One way to turn a reward per sample into an advantage per token."""

    compute: Callable[[AdvantageInputs, AdvantageConfig], tuple[list[Tensor], list[Tensor]]]
    """Gives ``(advantages_N, returns_N)``, one entry per response token."""
    needs_whole_responses: bool = False
    """Tokens depend on each other, so context-parallel pieces must be gathered first; else pieces do as well."""
    needs_values: bool = False
    """Needs the critic's values."""


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(group_relative_advantages),
    "gspo": Estimator(group_relative_advantages),
    "cispo": Estimator(group_relative_advantages),
    "reinforce_plus_plus": Estimator(reinforce_plus_plus_advantages, needs_whole_responses=True),
    "reinforce_plus_plus_baseline": Estimator(reinforce_plus_plus_baseline_advantages),
    "ppo": Estimator(ppo_advantages, needs_whole_responses=True, needs_values=True),
}


def get_estimator(name: str) -> Estimator:
    """The estimator of ``--advantage-estimator``."""
    if name not in ESTIMATORS:
        raise ConfigError(f"--advantage-estimator is {name!r}; it must be one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]
