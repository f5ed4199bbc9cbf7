"""IcePop: a token whose importance weight leaves an interval is dropped.

Shapes: T = response tokens of the micro-batch on this rank, samples concatenated.
"""

from __future__ import annotations

from torch import Tensor

from slime.algorithms.off_policy.weights import MismatchBounds, importance_weight, weight_metrics


def icepop(
    loss_T: Tensor, train_log_prob_T: Tensor, rollout_log_prob_T: Tensor, bounds: MismatchBounds
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return each token's loss times ``w`` where ``low <= w <= high``, and 0 elsewhere: what is not trusted is
    dropped.

    Args and returns as in ``truncated_importance_sampling``; ``tis_clipfrac`` counts the dropped tokens.

    Source: Ling Team, "IcePop", in Every Step Evolves, arXiv:2510.18855.
    """
    weight_T = importance_weight(train_log_prob_T, rollout_log_prob_T)
    is_trusted_T = (weight_T >= bounds.low) & (weight_T <= bounds.high)
    kept_T = weight_T.where(is_trusted_T, weight_T.new_zeros(()))
    return loss_T * kept_T, weight_metrics(weight_T, ~is_trusted_T)
