"""Inputs and targets of multi-token prediction (MTP): shifted copies of the packed tokens.

Depth k = 1, 2, ... looks k tokens further ahead than the model itself: at position p it gets token p + k and predicts
token p + 1 + k.  Each sequence is shifted before packing, so nothing crosses a sequence boundary, independent of
packing and context parallelism.

Shapes: T = tokens of the micro-batch on this rank, including padding; R = response tokens that its positions predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.train_data.microbatch import PackingConfig, pack_thd


@dataclass(frozen=True, slots=True)
class MultiTokenDepth:
    """Inputs and targets of one depth on one rank."""

    input_ids: Tensor
    """[1, T] token p + k at position p; the pad id beyond the end of a sequence, where nothing is predicted."""
    row_R: Tensor
    """Positions in this rank's stream that predict a response token at this depth."""
    target_R: Tensor
    """Token ids predicted at these positions."""
    weight_R: Tensor
    """fp32 loss weights of these tokens; 0 where the loss mask is 0."""


def multi_token_depths(
    num_depths: int,
    sequences: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    denominators_N: Sequence[float] | Tensor | None,
    packing: PackingConfig,
) -> list[MultiTokenDepth]:
    """Return inputs and targets of depths 1 ... ``num_depths``.

    A token's weight is its loss mask divided by its sample's denominator, as in the model's own loss
    (``algorithms.reduction``), so the sum over micro-batches and ranks does not depend on how samples are distributed.
    Tokens too close to the start of a sequence to be predicted that far ahead are left out.

    Args:
        num_depths: Number of MTP layers.
        sequences: [L] token ids each.
        loss_masks: [response] each, not sliced by context parallelism.
        denominators_N: Number of trained tokens of each sample's execution; None weights all tokens equally.
        packing: Packing of the tokens; see ``pack_thd``.
    """
    device = sequences[0].device
    if denominators_N is None:
        denominators_N = [1.0] * len(sequences)
    denominator_N = torch.as_tensor(denominators_N, dtype=torch.float32, device=device).clamp(min=1)
    prompts = [len(sequence) - len(mask) for sequence, mask in zip(sequences, loss_masks, strict=True)]
    stream = torch.cat(list(sequences))
    weights = [
        F.pad(mask.float() / denominator, (prompt, 0))
        for mask, denominator, prompt in zip(loss_masks, denominator_N, prompts, strict=True)
    ]
    weight_stream = torch.cat(weights)
    depths = []
    for depth in range(1, num_depths + 1):
        inputs = [F.pad(ids[depth:], (0, min(depth, len(ids)))) for ids in sequences]
        # Index into ``stream`` of the token predicted at each position.  Computed on the CPU, so that selecting the
        # rows needs no synchronization with the accelerator.
        predicted, start = [], 0
        for sequence, prompt in zip(sequences, prompts, strict=True):
            token = torch.arange(len(sequence)) + 1 + depth
            is_response = (token >= prompt) & (token < len(sequence))
            predicted.append(torch.where(is_response, token + start, -1))
            start += len(sequence)
        packed = pack_thd(predicted, packing, pad_id=-1).tokens[0]
        row_R = (packed >= 0).nonzero()[:, 0]
        token_R = packed[row_R].to(device, non_blocking=True)
        depths.append(
            MultiTokenDepth(
                input_ids=pack_thd(inputs, packing).tokens,
                row_R=row_R.to(device, non_blocking=True),
                target_R=stream[token_R],
                weight_R=weight_stream[token_R],
            )
        )
    return depths
