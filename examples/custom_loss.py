"""A custom loss: REINFORCE, the log-likelihood of each token times its advantage, without a clipped ratio.

--loss-type custom_loss --custom-loss-function-path examples.custom_loss.reinforce
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.log_probs import get_log_probs_and_entropy, reader_columns


def reinforce(
    args: Namespace, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-sum over samples of mean(advantage * log-prob)``, and metrics reduced in the same way."""
    _, result = get_log_probs_and_entropy(logits, args=args, **reader_columns(batch))
    loss_T = -torch.cat(batch["advantages"]) * torch.cat(result["log_probs"])
    loss = sum_of_sample_mean(loss_T)
    return loss, {"pg_loss": loss.detach()}
