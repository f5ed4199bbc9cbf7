"""The critic's loss."""

from __future__ import annotations

from argparse import Namespace

import torch
from torch import Tensor

from slime.algorithms.value_loss import clipped_value_loss
from slime.backends.megatron_utils.log_probs import get_values
from slime.backends.megatron_utils.losses.columns import Batch, LossAndMetrics, Reducer, TrainedTokens


def value_loss_function(args: Namespace, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer) -> LossAndMetrics:
    """The critic's clipped regression towards the returns."""
    tokens = TrainedTokens(batch)
    _, result = get_values(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    loss_T, clipped_T = clipped_value_loss(
        torch.cat(tokens.only(result["values"])),
        torch.cat(tokens.required("values", "the value loss needs the values from before training")),
        torch.cat(tokens.required("returns", "the value loss needs returns")),
        clip=args.value_clip,
    )
    loss = sum_of_sample_mean(loss_T)
    return loss, {"value_loss": loss, "value_clipfrac": sum_of_sample_mean(clipped_T)}
