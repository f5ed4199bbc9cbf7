"""GRPO, GSPO, CISPO: the group-normalised reward of a sample on every one of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from slime.algorithms.advantages.inputs import AdvantageConfig, AdvantageInputs


def group_relative_advantages(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[list[Tensor], list[Tensor]]:
    """Return ``A[t] = reward``, returns likewise.  The KL gives only the shapes: a penalty belongs in the loss here.

    Masked tokens get the value too; the reduction leaves them out.

    Source: GRPO with outcome supervision, arXiv:2402.03300, sec. 4.1.2.
    """
    returns_N = [
        torch.full_like(kl_R, float(reward), dtype=torch.float32)
        for reward, kl_R in zip(inputs.rewards_N, inputs.kl_N, strict=True)
    ]
    return list(returns_N), returns_N
