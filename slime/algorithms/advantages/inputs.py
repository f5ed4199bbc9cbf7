"""Inputs of the advantage estimators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

from torch import Tensor

from slime.utils.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageConfig:
    """Hyperparameters of the estimators; each uses those it needs."""

    kl_coef: float = 0.0
    """Weight of the KL penalty in the reward; ``--kl-coef``."""
    gamma: float = 1.0
    """Discount per token; ``--gamma``."""
    lambd: float = 1.0
    """Lambda of generalized advantage estimation; ``--lambd``."""

    def __post_init__(self) -> None:
        for flag, value in (("--gamma", self.gamma), ("--lambd", self.lambd)):
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"{flag} is {value}; it must be between 0 and 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageInputs:
    """Inputs for N samples.  Per-token lists have one [R] tensor per sample; all tensors are constant."""

    rewards_N: Sequence[float] | Tensor
    """Reward of each sample, relative to its group if the estimator has a ``group_baseline``."""
    kl_N: Sequence[Tensor]
    """KL from the reference per token, in nats; zeros without a penalty.  Defines the lengths R."""
    mask_N: Sequence[Tensor] | None = None
    """1 for trained tokens; None means all are trained."""
    values_N: Sequence[Tensor] | None = None
    """The critic's value per token."""
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """The columns of ``Estimator.columns`` by name; one entry per sample, [R] if the column spans the response."""


Advantages = Callable[[AdvantageInputs, AdvantageConfig], tuple[list[Tensor], list[Tensor]]]
"""Returns ``(advantages_N, returns_N)``, one [R] tensor per sample."""


def _is_trained(mask_N: Sequence[Tensor], like_N: Sequence[Tensor]) -> list[Tensor]:
    """Return bool masks of trained tokens, on the devices of ``like_N``."""
    return [mask.to(like.device) != 0 for mask, like in zip(mask_N, like_N, strict=True)]


def over_trained_tokens(compute: Advantages) -> Advantages:
    """Make ``compute`` see only the trained tokens, as if the response had no others; the others get 0.

    A tool's token is not a time step: it is not discounted, does not bootstrap and pays no KL penalty, and the reward
    goes to the last token that the policy chose.  ``AdvantageInputs.columns`` are passed unchanged.
    """

    @wraps(compute)
    def over_all(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[list[Tensor], list[Tensor]]:
        if inputs.mask_N is None:
            return compute(inputs, config)
        is_trained_N = _is_trained(inputs.mask_N, inputs.kl_N)

        def trained(column_N: Sequence[Tensor]) -> list[Tensor]:
            return [values[is_trained] for values, is_trained in zip(column_N, is_trained_N, strict=True)]

        def spread(trained_N: Sequence[Tensor]) -> list[Tensor]:
            return [
                values.new_zeros(len(is_trained)).masked_scatter(is_trained, values)
                for values, is_trained in zip(trained_N, is_trained_N, strict=True)
            ]

        values_N = None if inputs.values_N is None else trained(inputs.values_N)
        seen = replace(inputs, kl_N=trained(inputs.kl_N), values_N=values_N, mask_N=None)
        advantages_N, returns_N = compute(seen, config)
        return spread(advantages_N), spread(returns_N)

    return over_all


def token_rewards(inputs: AdvantageInputs, config: AdvantageConfig) -> list[Tensor]:
    """Return ``-kl_coef * kl[t]``, plus the sample's reward at its last token."""
    rewards_N = []
    for reward, kl_R in zip(inputs.rewards_N, inputs.kl_N, strict=True):
        rewards_R = -config.kl_coef * kl_R
        rewards_R[-1:] += float(reward)
        rewards_N.append(rewards_R)
    return rewards_N
