"""The critic's regression, clipped around what it said when the rollout was made.

Shapes: T = response tokens of the micro-batch on this rank, samples concatenated.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_value_loss(
    value_T: Tensor, old_value_T: Tensor, return_T: Tensor, *, clip: float
) -> tuple[Tensor, Tensor]:
    """The larger of two squared errors; no factor one half:

        loss = max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2)

    Args:
        value_T: the critic now; carries the gradient.
        old_value_T: the critic before this rollout's training.
        return_T: the target.
        clip: ``--value-clip``.

    Returns:
        ``(loss_T, clipped_T)``: the loss, and 1.0 where the clipped error set it.

    Source: the value clipping of PPO's reference code, described in Engstrom et al., arXiv:2005.12729, sec. 3.
    """
    bounded_T = torch.maximum(torch.minimum(value_T, old_value_T + clip), old_value_T - clip)
    loss_T = (value_T - return_T).square()
    bounded_loss_T = (bounded_T - return_T).square()
    return torch.maximum(loss_T, bounded_loss_T), (bounded_loss_T > loss_T).float()
