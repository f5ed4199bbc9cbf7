"""From a value per token to one number per step: which denominator, and why.

Default: the mean over rollouts of the mean over each rollout's trained tokens.  A rollout that was cut into several
samples (fan-out) counts once, because all its samples divide by the trained tokens of the whole rollout; and because
that denominator is known before micro-batches are formed, the sum over micro-batches and ranks does not depend on how
the samples were packed.  With ``--calculate-per-token-loss``: the mean over all trained tokens of the step.

A rollout without a trained token (masked, removed, an empty response) adds nothing to the sum but still counts among
the rollouts of the step, so that what a filter drops does not make the others weigh more; per token, a sample without
one counts as one token.

Shapes: T = response tokens of the micro-batch on this rank, samples concatenated; N = samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Reducer = Callable[[Tensor], Tensor]
"""[T] values to the scalar that this rank contributes."""


def sum_of_sample_means(
    loss_masks_N: Sequence[Tensor], denominators_N: Sequence[float] | Tensor | None, *, per_token: bool = False
) -> Reducer:
    """Return a reducer over the tokens of a micro-batch:

        default:    sum over samples of  sum(x * mask) / max(denominator, 1)
        per_token:  sum(x * mask)

    What is masked cannot contribute, not even a NaN.

    Args:
        loss_masks_N: one mask per sample, of those of its response tokens that are on this rank.
        denominators_N: trained tokens of the rollout that each sample belongs to (``rollout_mask_sums``), over all
            its samples and all ranks.  None takes each sample's own mask, which is right only for samples that are
            whole rollouts, on one rank.
        per_token: sum over tokens; the division by the number of tokens is left to the caller.
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
    """Count the trained tokens of the samples, at least one for each; the normaliser of the per-token loss."""
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
    """Scale the reduced loss of a micro-batch such that Megatron's own averaging yields the mean described above.

    Default: Megatron divides by the number of micro-batches and averages gradients over the ranks of DP and CP; both
    are undone here, and the sum over rollouts is divided by the rollouts of the step.  Per token: Megatron divides
    the summed gradient by the summed number of tokens, which counts a sample once on each CP rank.
    """
    if per_token:
        return loss * cp_size
    return loss * (num_microbatches * dp_size * cp_size / step_global_batch_size)
