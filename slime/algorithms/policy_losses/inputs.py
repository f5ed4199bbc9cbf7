"""Inputs and outputs of the policy losses.

Shapes: N = samples; r = response tokens of a sample on this rank; R = response tokens of a whole sample, not sliced by
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
    """Ratio ceiling is ``1 + high``. A value above ``low`` is DAPO's clip-higher; ``--eps-clip-high``."""
    dual: float | None = None
    """Loss ceiling is ``dual * |A|`` where A < 0; ``--eps-clip-c``. None turns it off."""

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
    """A micro-batch on this rank.  Log-probs and advantages of untrained tokens are 0, never NaN."""

    log_prob_N: Sequence[Tensor]
    """[r] each, under the trained policy; carries the gradient."""
    old_log_prob_N: Sequence[Tensor]
    """[r] each, under the policy at the start of training on the rollout; constant."""
    advantage_N: Sequence[Tensor]
    """[r] each; constant."""
    mask_N: Sequence[Tensor]
    """[R] each, 1 for trained tokens."""
    gather: Callable[[Sequence[Tensor]], list[Tensor]] = _as_they_are
    """Gathers [r] each to [R] each; differentiable.  A collective with context parallelism: all ranks must call it."""

    @property
    def log_ratio_T(self) -> Tensor:
        """log pi_new(token) - log pi_old(token), in nats; carries the gradient."""
        return torch.cat(list(self.log_prob_N)) - torch.cat(list(self.old_log_prob_N))

    @property
    def advantage_T(self) -> Tensor:
        """The advantages, concatenated."""
        return torch.cat(list(self.advantage_N))


class TokenLosses(NamedTuple):
    """Per-token results of a policy loss."""

    loss_T: Tensor
    """To be minimized; carries the gradient."""
    clipped_T: Tensor
    """1.0 where the clip is active, else 0."""
    log_ratio_T: Tensor
    """Log of the ratio used by the loss; in GSPO, that of the whole sequence."""


PolicyLossFunction = Callable[[PolicyLossInputs, ClipConfig], TokenLosses]
