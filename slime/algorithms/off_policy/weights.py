"""The weight of a token that the engine sampled from slightly other probabilities than the trainer computes.

Shapes: T = response tokens of the micro-batch on this rank, samples concatenated.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from slime.utils.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchBounds:
    """The interval of importance weights that are trusted."""

    low: float = 0.0
    """``--tis-clip-low``."""
    high: float = 2.0
    """``--tis-clip``."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high:
            raise ConfigError(
                f"--tis-clip-low is {self.low} and --tis-clip {self.high}; it must be 0 <= tis-clip-low <= tis-clip"
            )


def importance_weight(train_log_prob_T: Tensor, rollout_log_prob_T: Tensor) -> Tensor:
    """Return ``w = pi_train / pi_rollout`` of each token, under the same weights; constant."""
    return (train_log_prob_T.detach() - rollout_log_prob_T.detach()).exp()


def weight_metrics(weight_T: Tensor, changed_T: Tensor) -> dict[str, Tensor]:
    """Return ``tis`` the weight before any bound, ``tis_clipfrac`` 1.0 where a bound acted, ``tis_abs`` its distance
    to 1.
    """
    return {
        "tis": weight_T,
        "tis_clipfrac": changed_T.float(),
        "tis_abs": (weight_T - 1).abs(),
    }
