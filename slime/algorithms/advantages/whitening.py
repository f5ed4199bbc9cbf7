"""Masked whitening of advantages over all ranks that train on the same rollout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slime.utils.errors import DataError

VARIANCE_EPSILON = 1e-8


def whiten(
    values_N: Sequence[Tensor], mask_N: Sequence[Tensor], *, group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Return ``(x - mean) / sqrt(var + 1e-8)`` with mean and variance over the trained tokens of all ranks.

    The variance is unbiased if there are at least two trained tokens.  Masked tokens do not count toward the
    statistics, but are shifted and scaled too.  Sums are exchanged in float64, so that a variance that is small
    relative to the squared mean is not lost.

    Args:
        values_N: One tensor per sample, with its tokens on this rank.
        mask_N: Same shapes; 1 for trained tokens.
        group: Ranks to reduce over (data and context parallel); None means this rank only.

    Raises:
        DataError: no rank has a trained token; raised on all ranks.
    """
    device = values_N[0].device if values_N else None
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # count, sum, sum of squares
    for values, mask in zip(values_N, mask_N, strict=True):
        trained = values[mask.to(values.device) != 0].double()
        sums += torch.stack([sums.new_tensor(float(len(trained))), trained.sum(), trained.square().sum()])
    if group is not None:
        dist.all_reduce(sums, group=group)
    count, total, squares = sums.tolist()
    if count == 0:
        raise DataError(
            "--normalize-advantages: no token of the rollout is trained, so there is no mean; check the loss masks "
            "and the filters that set remove_sample"
        )
    mean = total / count
    variance = max(squares / count - mean * mean, 0.0)
    if count >= 2:
        variance *= count / (count - 1)
    scale = (variance + VARIANCE_EPSILON) ** -0.5
    return [(values - mean) * scale for values in values_N]
