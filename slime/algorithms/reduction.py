"""Reduces per-token values to one number per step, with the right denominator.

By default this is the mean over executions of the mean over each execution's trained tokens.  An execution that was
split into several samples (fan-out) counts once, because all its samples divide by the trained tokens of the whole
execution.  This denominator is known before micro-batches are formed, so the sum over micro-batches and ranks does not
depend on how samples are packed.  With ``--calculate-per-token-loss`` it is the mean over all trained tokens of the
step.

An execution without trained tokens (masked, removed, empty response) adds nothing to the sum but still counts as one
of the step's executions, so dropping it does not raise the weight of the others.  In the per-token mean, a sample
without trained tokens counts as one token.

Shapes: T = response tokens of the micro-batch on this rank, samples concatenated; N = samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Reducer = Callable[[Tensor], Tensor]
"""Maps [T] values to this rank's scalar contribution."""


def sum_of_sample_means(
    loss_masks_N: Sequence[Tensor], denominators_N: Sequence[float] | Tensor | None, *, per_token: bool = False
) -> Reducer:
    """Return a reducer over the tokens of a micro-batch:

        default:    sum over samples of  sum(x * mask) / max(denominator, 1)
        per_token:  sum(x * mask)

    Masked values never contribute, not even NaN.

    Args:
        loss_masks_N: One mask per sample, of its response tokens on this rank.
        denominators_N: Number of trained tokens of each sample's execution (``rollout_mask_sums``), over all its
            samples and all ranks.  None uses each sample's own mask, which is right only if samples are whole
            executions on one rank.
        per_token: Sum over tokens; the caller divides by the number of tokens.
    """
    sizes = [len(mask) for mask in loss_masks_N]
    mask_T = torch.cat([mask.float() for mask in loss_masks_N]) if sizes else torch.zeros(0)
    weight_T = mask_T
    if not per_token:
        if denominators_N is None:
            denominators_N = [float(mask.sum()) for mask in loss_masks_N]
        denominator_N = torch.as_tensor(denominators_N, dtype=torch.float32, device=mask_T.device).clamp(min=1)
        assert len(denominator_N) == len(sizes), (len(denominator_N), len(sizes))
        size_N = torch.tensor(sizes, device=mask_T.device)
        weight_T = mask_T / denominator_N.repeat_interleave(size_N, output_size=len(mask_T))

    def reduce(values_T: Tensor) -> Tensor:
        if values_T.shape != weight_T.shape:
            raise ValueError(f"{tuple(values_T.shape)} values for {tuple(weight_T.shape)} response tokens")
        return torch.where(weight_T != 0, values_T * weight_T, 0.0).sum()

    return reduce


def num_loss_tokens(loss_masks_N: Sequence[Tensor]) -> Tensor:
    """Count the trained tokens of the samples, at least one per sample; the denominator of the per-token loss."""
    return torch.stack([mask.sum().clamp(min=1) for mask in loss_masks_N]).sum()


def scale_for_megatron(
    loss: Tensor,
    *,
    per_token: bool,
    num_microbatches: int,
    step_global_batch_size: int,
    dp_size: int,
    cp_size: int,
) -> Tensor:
    """Scale the reduced loss of a micro-batch so that Megatron's own averaging yields the mean described above.

    By default Megatron divides by the number of micro-batches and averages gradients over DP and CP ranks.  This
    function undoes both and divides by the number of executions in the step.  With ``per_token``, Megatron divides the
    summed gradient by the summed number of tokens, which counts each sample once per CP rank.
    """
    if per_token:
        return loss * cp_size
    return loss * (num_microbatches * dp_size * cp_size / step_global_batch_size)
