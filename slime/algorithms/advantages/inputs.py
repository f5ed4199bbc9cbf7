"""Inputs of every advantage estimator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from slime.utils.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageConfig:
    """The numbers of an estimator; each uses those it needs."""

    kl_coef: float = 0.0
    """Weight of the KL penalty in the reward; ``--kl-coef``."""
    gamma: float = 1.0
    """Discount per token; ``--gamma``."""
    lambd: float = 1.0
    """Lambda of generalised advantage estimation; ``--lambd``."""

    def __post_init__(self) -> None:
        for flag, value in (("--gamma", self.gamma), ("--lambd", self.lambd)):
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"{flag} is {value}; it must be between 0 and 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageInputs:
    """N samples.  Every list has one [R] tensor per sample, one entry per response token; all constant."""

    rewards_N: Sequence[float] | Tensor
    """Reward of each sample, group-normalised where the estimator wants that."""
    kl_N: Sequence[Tensor]
    """KL from the reference of each token, in nats; zeros when there is no penalty.  Gives the lengths."""
    mask_N: Sequence[Tensor] | None = None
    """1 where a token is trained; None is all of them."""
    values_N: Sequence[Tensor] | None = None
    """The critic's value of each token."""
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """The columns of ``Estimator.columns``, by name; one entry for each sample, [R] where they span the response."""
