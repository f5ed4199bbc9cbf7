"""Inputs and targets of multi-token prediction: the packed tokens once more, shifted.

Depth k = 1, 2, ... looks k tokens further than the model itself: at position p it is given token p + k and predicts
token p + 1 + k.  Everything is shifted within each sequence before it is packed, so that nothing crosses a border of
sequences, whatever the packing and however context parallelism cuts the stream.

Shapes: T = tokens of the micro-batch on this rank, padding included; R = response tokens that its positions predict.
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
    """[1, T] token p + k under position p; the pad id beyond the end of a sequence, where nothing is predicted."""
    row_R: Tensor
    """Positions of this rank's stream that predict a response token at this depth."""
    target_R: Tensor
    """The tokens that they predict."""
    weight_R: Tensor
    """fp32 factor of each one's loss; 0 where the token's loss mask is."""


def multi_token_depths(
    num_depths: int,
    sequences: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    denominators_N: Sequence[float] | Tensor | None,
    packing: PackingConfig,
) -> list[MultiTokenDepth]:
    """Return inputs and targets of depths 1 ... ``num_depths``.

    A token's weight is its loss mask over the denominator of its sample: the same as in the loss of the model itself
    (``algorithms.reduction``), so that the sum over micro-batches and ranks depends on neither.  A token that is too
    near to the start of its sequence to be predicted so far ahead is left out.

    Args:
        num_depths: layers of multi-token prediction.
        sequences: [L] token ids each.
        loss_masks: [response] each, whole whatever the context parallelism.
        denominators_N: trained tokens of the rollout that each sample belongs to; None weighs all tokens alike.
        packing: that of the tokens, see ``pack_thd``.
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
        # Where in ``stream`` the predicted token of each position is, on the CPU: which rows those are need not be
        # asked of the accelerator.
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
