"""The length term of Dr. GRPO: divide the loss of every response by the same constant instead of its own length.

    --disable-grpo-std-normalization
    --custom-pg-loss-reducer-function-path examples.DrGRPO.custom_reducer.get_pg_loss_reducer

This applies to the policy loss only; entropy, KL and metrics are still averaged.

Source: Liu et al., "Understanding R1-Zero-like training: a critical perspective", arXiv:2503.20783, sec. 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean

DIVISOR = 1000.0
"""In tokens.  Its value only scales the learning rate; the paper uses the maximum response length."""


def get_pg_loss_reducer(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool = False,
) -> Callable[[Tensor], Tensor]:
    """Return a reducer for ``sum over samples of sum(x * mask) / DIVISOR``, with any context parallelism.

    Args:
        total_lengths: Number of tokens of each sample.
        response_lengths: Number of response tokens of each sample.
        loss_masks: Masks of whole responses.
        calculate_per_token_loss: Return the plain sum instead, which Megatron divides by the tokens of the step.
    """
    return get_sum_of_sample_mean(
        total_lengths, response_lengths, loss_masks, [DIVISOR] * len(loss_masks), calculate_per_token_loss
    )
