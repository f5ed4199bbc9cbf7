"""The length term of Dr. GRPO: every response is divided by the same constant, and not by its own length.

    --disable-grpo-std-normalization
    --custom-pg-loss-reducer-function-path examples.DrGRPO.custom_reducer.get_pg_loss_reducer

Only the policy loss is reduced this way; entropy, KL and metrics keep their means.

Source: Liu et al., "Understanding R1-Zero-like training: a critical perspective", arXiv:2503.20783, sec. 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean

DIVISOR = 1000.0
"""Tokens.  Its size only scales the learning rate; the paper takes the longest response there may be."""


def get_pg_loss_reducer(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool = False,
) -> Callable[[Tensor], Tensor]:
    """``sum over samples of sum(x * mask) / DIVISOR``, whatever the context parallelism.

    Args:
        total_lengths: tokens of each sample.
        response_lengths: response tokens of each.
        loss_masks: of whole responses.
        calculate_per_token_loss: then the plain sum is asked for, which Megatron divides by the tokens of the step.
    """
    return get_sum_of_sample_mean(
        total_lengths, response_lengths, loss_masks, [DIVISOR] * len(loss_masks), calculate_per_token_loss
    )
