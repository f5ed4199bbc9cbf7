"""GRPO, GSPO, CISPO: every token of a sample gets its group-normalized reward."""

from __future__ import annotations

import torch
from torch import Tensor

from slime.algorithms.advantages.inputs import AdvantageConfig, AdvantageInputs


def group_relative_advantages(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[list[Tensor], list[Tensor]]:
    """Return ``A[t] = reward`` as advantages and as returns.

    The KL is used only for its shape: in these algorithms the penalty belongs in the loss.  Masked tokens get the
    value too; the reduction ignores them.

    Source: GRPO with outcome supervision, arXiv:2402.03300, sec. 4.1.2.
    """
    returns_N = [
        torch.full_like(kl_R, float(reward), dtype=torch.float32)
        for reward, kl_R in zip(inputs.rewards_N, inputs.kl_N, strict=True)
    ]
    return list(returns_N), returns_N
