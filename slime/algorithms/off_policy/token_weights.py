"""TIS and IcePop: weights for the loss of tokens that the engine drew with slightly different probabilities.

Shapes: T = response tokens of the micro-batch on this rank, samples concatenated.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from slime.utils.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchBounds:
    """The interval of trusted importance weights."""

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
    """Return ``w = pi_train / pi_rollout`` of each token, both with the same model weights; constant."""
    return (train_log_prob_T.detach() - rollout_log_prob_T.detach()).exp()


def weight_metrics(weight_T: Tensor, changed_T: Tensor) -> dict[str, Tensor]:
    """Return per-token metrics: ``tis`` (weight before bounding), ``tis_clipfrac`` (1.0 if a bound changed it) and
    ``tis_abs`` (its distance from 1).
    """
    return {
        "tis": weight_T,
        "tis_clipfrac": changed_T.float(),
        "tis_abs": (weight_T - 1).abs(),
    }


def truncated_importance_sampling(
    loss_T: Tensor, train_log_prob_T: Tensor, rollout_log_prob_T: Tensor, bounds: MismatchBounds
) -> tuple[Tensor, dict[str, Tensor]]:
    """Multiply each token's loss by ``clamp(w, low, high)``, where ``w = pi_train / pi_rollout`` for the same weights.

    Args:
        loss_T: Policy loss; carries the gradient.
        train_log_prob_T: Log-probability under the sampling policy, computed by the trainer.
        rollout_log_prob_T: Log-probability recorded by the engine.
        bounds: Trusted interval of ``w``.

    Returns:
        ``(loss_T, metrics)`` with the per-token metrics of ``weight_metrics``.

    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025.
    """
    weight_T = importance_weight(train_log_prob_T, rollout_log_prob_T)
    clamped_T = weight_T.clamp(bounds.low, bounds.high)
    return loss_T * clamped_T, weight_metrics(weight_T, clamped_T != weight_T)


def icepop(
    loss_T: Tensor, train_log_prob_T: Tensor, rollout_log_prob_T: Tensor, bounds: MismatchBounds
) -> tuple[Tensor, dict[str, Tensor]]:
    """Multiply each token's loss by ``w`` if ``low <= w <= high``, and by 0 otherwise: untrusted tokens are dropped.

    Args and returns as in ``truncated_importance_sampling``; ``tis_clipfrac`` is 1.0 for dropped tokens.

    Source: Ling Team, "IcePop", in Every Step Evolves, arXiv:2510.18855.
    """
    weight_T = importance_weight(train_log_prob_T, rollout_log_prob_T)
    is_trusted_T = (weight_T >= bounds.low) & (weight_T <= bounds.high)
    kept_T = weight_T.where(is_trusted_T, weight_T.new_zeros(()))
    return loss_T * kept_T, weight_metrics(weight_T, ~is_trusted_T)
