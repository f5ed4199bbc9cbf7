"""The critic's regression loss, clipped around its values before training on the rollout.

Shapes: T = response tokens of the micro-batch on this rank, samples concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def clipped_value_loss(
    value_T: Tensor, old_value_T: Tensor, return_T: Tensor, *, clip: float
) -> tuple[Tensor, Tensor]:
    """Return the larger of two squared errors, without a factor of one half:

        loss = max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2)

    Args:
        value_T: Current values of the critic; carries the gradient.
        old_value_T: Values of the critic before training on this rollout.
        return_T: Regression target.
        clip: ``--value-clip``.

    Returns:
        ``(loss_T, clipped_T)``: the loss, and 1.0 where the clipped error set it.

    Source: the value clipping of PPO's reference code, described in Engstrom et al., arXiv:2005.12729, sec. 3.
    """
    bounded_T = torch.maximum(torch.minimum(value_T, old_value_T + clip), old_value_T - clip)
    loss_T = (value_T - return_T).square()
    bounded_loss_T = (bounded_T - return_T).square()
    return torch.maximum(loss_T, bounded_loss_T), (bounded_loss_T > loss_T).float()


def explained_variance_sums(
    values_N: Sequence[Tensor], returns_N: Sequence[Tensor], mask_N: Sequence[Tensor]
) -> Tensor:
    """Return the sums that :func:`explained_variance` needs; add up the sums of several ranks.

    Args:
        values_N: [R] each, values of the critic.
        returns_N: [R] each, actual returns.
        mask_N: [R] each, 1 for trained tokens.

    Returns:
        [5] float64: number of trained tokens; sum and sum of squares of the returns; the same for returns - values.
    """
    sums = torch.zeros(5, dtype=torch.float64, device=values_N[0].device if values_N else None)
    for values_R, returns_R, mask_R in zip(values_N, returns_N, mask_N, strict=True):
        trained = mask_R.to(values_R.device) != 0
        target, error = returns_R[trained].double(), (returns_R - values_R)[trained].double()
        count = sums.new_tensor(float(len(target)))
        sums += torch.stack([count, target.sum(), target.square().sum(), error.sum(), error.square().sum()])
    return sums


def explained_variance(sums: Tensor) -> float:
    """Return 1 - Var(return - value) / Var(return): 1 for a perfect critic, 0 for a constant one, negative for worse.

    Returns 0 if the returns do not vary.
    """
    count, total, squares, error_total, error_squares = sums.tolist()
    if count == 0:
        return 0.0
    variance = squares / count - (total / count) ** 2
    error_variance = error_squares / count - (error_total / count) ** 2
    return 1.0 - error_variance / variance if variance > 1e-12 else 0.0
