"""From the logits of a micro-batch to what Megatron's schedules minimise: choose the loss, run it, scale it.

The losses themselves are in ``losses/``, one per file, their formulas in ``slime.algorithms``.  Every loss returns the
reduced loss and a dict of reduced metrics: sums over this rank's samples, which ``train_metrics`` adds up and divides.

This module is also the place where plug-ins import the losses from.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.algorithms.reduction import num_loss_tokens, scale_for_megatron
from slime.backends.megatron_utils.advantages import compute_advantages_and_returns
from slime.backends.megatron_utils.layers.mtp import LogitsAndMtp
from slime.backends.megatron_utils.layers.mtp_loss import mtp_loss
from slime.backends.megatron_utils.log_probs import get_log_probs_and_entropy, get_values
from slime.backends.megatron_utils.losses.columns import Batch, LossAndMetrics, reducer_of
from slime.backends.megatron_utils.losses.custom import custom_loss_function
from slime.backends.megatron_utils.losses.mismatch import icepop_function, vanilla_tis_function
from slime.backends.megatron_utils.losses.policy import policy_loss_function
from slime.backends.megatron_utils.losses.sft import sft_loss_function
from slime.backends.megatron_utils.losses.value import value_loss_function

__all__ = [
    "LOSSES",
    "compute_advantages_and_returns",
    "custom_loss_function",
    "get_log_probs_and_entropy",
    "get_values",
    "icepop_function",
    "loss_function",
    "policy_loss_function",
    "sft_loss_function",
    "value_loss_function",
    "vanilla_tis_function",
]

LOSSES: dict[str, Callable[..., LossAndMetrics]] = {
    "policy_loss": policy_loss_function,
    "value_loss": value_loss_function,
    "sft_loss": sft_loss_function,
    "custom_loss": custom_loss_function,
}
"""By ``--loss-type``; ``value_loss`` is the critic's.  The same names as in ``slime.algorithms.loss_types``."""


def loss_function(
    args: Namespace,
    batch: Batch,
    num_microbatches: int,
    step_global_batch_size: int,
    loss_type: str,
    logits: Tensor | LogitsAndMtp,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Loss of one micro-batch, scaled for Megatron's averaging; see ``algorithms.reduction.scale_for_megatron``.

    Args:
        args: the run's arguments.
        batch: a batch of ``data.get_batch``.
        num_microbatches: micro-batches of the step on this rank.
        step_global_batch_size: rollouts of the step on all ranks.
        loss_type: key of :data:`LOSSES`.
        logits: the model's output, [1, T, V], with the log-probs of its MTP layers when these are trained.

    Returns:
        the scaled loss, Megatron's normaliser (1, or the number of trained tokens with
        ``--calculate-per-token-loss``), and ``{"names": [...], "values": [trained tokens, metric, ...]}``.
    """
    mtp_log_probs: list[Tensor] = []
    if isinstance(logits, LogitsAndMtp):
        logits, mtp_log_probs = logits
    reducer = reducer_of(args, batch, batch["loss_masks"])
    function = LOSSES[loss_type]
    if args.recompute_loss_function:
        loss, metrics = checkpoint(function, args, batch, logits, reducer, use_reentrant=False)
    else:
        loss, metrics = function(args, batch, logits, reducer)
    if not loss.requires_grad and torch.is_grad_enabled():
        # A rank without response tokens takes part in the backward pass all the same.
        loss = loss + 0 * logits.flatten()[0]
    if mtp_log_probs:
        ahead, ahead_metrics = mtp_loss(batch["mtp_inputs"].depths, mtp_log_probs)
        loss = loss + args.mtp_loss_scaling_factor * ahead
        metrics = {**metrics, **ahead_metrics}
    num_tokens = num_loss_tokens(batch["loss_masks"])
    scaled = scale_for_megatron(
        loss,
        per_token=args.calculate_per_token_loss,
        num_microbatches=num_microbatches,
        step_global_batch_size=step_global_batch_size,
        dp_size=mpu.get_data_parallel_world_size(),
        cp_size=mpu.get_context_parallel_world_size(),
    )
    normaliser = num_tokens.int() if args.calculate_per_token_loss else torch.ones_like(num_tokens, dtype=torch.int)
    values = torch.stack([num_tokens.float(), *(value.detach().float() for value in metrics.values())])
    return scaled, normaliser, {"names": list(metrics), "values": values}
