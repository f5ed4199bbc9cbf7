"""TIS: the loss of a token times its importance weight, cut to an interval.

Shapes: T = response tokens of the micro-batch on this rank, samples concatenated.
"""

from __future__ import annotations

from torch import Tensor

from slime.algorithms.off_policy.weights import MismatchBounds, importance_weight, weight_metrics


def truncated_importance_sampling(
    loss_T: Tensor, train_log_prob_T: Tensor, rollout_log_prob_T: Tensor, bounds: MismatchBounds
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return each token's loss times ``clamp(w, low, high)``, ``w = pi_train / pi_rollout`` of the same weights.

    Args:
        loss_T: the policy loss; carries the gradient.
        train_log_prob_T: log-probability by the trainer of the policy that sampled.
        rollout_log_prob_T: log-probability by the engine, as recorded.
        bounds: what is trusted.

    Returns:
        ``(loss_T, metrics)`` with per-token metrics: ``tis`` the weight before the cut, ``tis_clipfrac`` 1.0 where it
        was cut, ``tis_abs`` its distance from 1.

    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025.
    """
    weight_T = importance_weight(train_log_prob_T, rollout_log_prob_T)
    clamped_T = weight_T.clamp(bounds.low, bounds.high)
    return loss_T * clamped_T, weight_metrics(weight_T, clamped_T != weight_T)
