"""Inputs and result of every policy loss.

Shapes: N = samples; r = response tokens of a sample on this rank; R = response tokens of a sample, whole whatever the
context parallelism; T = response tokens of the micro-batch on this rank, samples concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slime.utils.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipConfig:
    """The trust region of the probability ratio."""

    low: float = 0.2
    """Ratio floor is ``1 - low``. Dimensionless; ``--eps-clip``."""
    high: float = 0.2
    """Ratio ceiling is ``1 + high``. Above ``low`` this is DAPO's clip-higher; ``--eps-clip-high``."""
    dual: float | None = None
    """Loss ceiling ``dual * |A|`` where A < 0; ``--eps-clip-c``. None turns it off."""

    def __post_init__(self) -> None:
        if self.dual is not None and self.dual <= 1.0:
            raise ConfigError(
                f"--eps-clip-c is {self.dual}; it must be above 1, or it would clip on-policy tokens; leave it out "
                "to turn dual clipping off"
            )


def _as_they_are(column_N: Sequence[Tensor]) -> list[Tensor]:
    return list(column_N)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossInputs:
    """A micro-batch of this rank.  Where a token is not trained, log-probs and advantages are 0, never NaN."""

    log_prob_N: Sequence[Tensor]
    """[r] each, under the policy that is trained; carries the gradient."""
    old_log_prob_N: Sequence[Tensor]
    """[r] each, under the policy at the start of the rollout's training; constant."""
    advantage_N: Sequence[Tensor]
    """[r] each; constant."""
    mask_N: Sequence[Tensor]
    """[R] each, 1 where a token is trained."""
    gather: Callable[[Sequence[Tensor]], list[Tensor]] = _as_they_are
    """[r] each to [R] each, differentiably.  A collective with context parallelism: every rank calls it alike."""

    @property
    def log_ratio_T(self) -> Tensor:
        """log pi_new(token) - log pi_old(token), in nats; carries the gradient."""
        return torch.cat(list(self.log_prob_N)) - torch.cat(list(self.old_log_prob_N))

    @property
    def advantage_T(self) -> Tensor:
        """The advantages in one piece."""
        return torch.cat(list(self.advantage_N))


class TokenLosses(NamedTuple):
    """One number per token each."""

    loss_T: Tensor
    """To be minimised; carries the gradient."""
    clipped_T: Tensor
    """1.0 where the trust region set it."""
    log_ratio_T: Tensor
    """Log of the ratio that the loss used; of the whole sequence in GSPO."""


PolicyLossFunction = Callable[[PolicyLossInputs, ClipConfig], TokenLosses]
