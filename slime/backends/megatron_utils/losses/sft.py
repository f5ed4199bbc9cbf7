"""Supervised fine-tuning."""

from __future__ import annotations

from argparse import Namespace

import torch
from torch import Tensor

from slime.backends.megatron_utils.losses.columns import (
    Batch,
    LossAndMetrics,
    Reducer,
    TrainedTokens,
    response_log_probs,
)


def sft_loss_function(args: Namespace, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer) -> LossAndMetrics:
    """Negative log-likelihood of the trained tokens of the response."""
    log_probs, _ = response_log_probs(args, batch, logits, with_entropy=False)
    loss = -sum_of_sample_mean(torch.cat(TrainedTokens(batch).only(log_probs)))
    return loss, {"loss": loss}
