"""The loss of the MTP layers: what goes into a forward pass for it, and what is made of the log-probs that come out.

    loss of depth k = minus the log-prob of the token 1 + k ahead, averaged over the step as the policy's loss is
    loss = --mtp-loss-scaling-factor * mean over the depths

The same masks and denominators as the policy's make it independent of packing and layout.  The softmax is the model's
own, at temperature 1.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu
from megatron.core.utils import unwrap_model

from slime.backends.megatron_utils.layers.mtp import MtpInputs
from slime.train_data.multi_token import MultiTokenDepth, multi_token_depths


def mtp_inputs(args: Namespace, chunk: torch.nn.Module, batch: dict[str, Any]) -> MtpInputs | None:
    """Inputs and targets of the MTP layers for a batch of ``data.get_batch``; None where there is nothing to train."""
    if not (args.enable_mtp_training and hasattr(unwrap_model(chunk), "mtp")):
        return None
    depths = multi_token_depths(
        args.mtp_num_layers,
        batch["unconcat_tokens"],
        batch["loss_masks"],
        None if args.calculate_per_token_loss else batch["rollout_mask_sums"],
        cp_rank=mpu.get_context_parallel_rank(),
        cp_size=mpu.get_context_parallel_world_size(),
        pad_multiple=mpu.get_tensor_model_parallel_world_size() * args.data_pad_size_multiplier,
        layout="allgather" if args.allgather_cp else "zigzag",
    )
    assert depths[0].input_ids.shape == batch["tokens"].shape, (depths[0].input_ids.shape, batch["tokens"].shape)
    return MtpInputs(depths=depths, vocab_size=args.vocab_size, chunk_size=args.log_probs_chunk_size)


def mtp_loss(depths: Sequence[MultiTokenDepth], log_probs: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss over the depths, reduced but not yet weighed against the policy's, and what is logged of it.

    Args:
        depths: the targets.
        log_probs: [depth] their log-probs [R].

    Returns:
        the loss, and ``mtp_loss`` with ``mtp_{depth}_loss``, depths counted from 1.
    """
    # What is masked cannot contribute, not even a NaN.
    losses = [
        -torch.where(depth.weight_R != 0, log_prob_R * depth.weight_R, 0.0).sum()
        for depth, log_prob_R in zip(depths, log_probs, strict=True)
    ]
    loss = torch.stack(losses).mean()
    by_depth = {f"mtp_{index}_loss": value for index, value in enumerate(losses, start=1)}
    return loss, {"mtp_loss": loss, **by_depth}
