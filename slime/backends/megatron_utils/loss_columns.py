"""Columns of a packed micro-batch as the losses read them.

Entries of tokens that are not trained are undefined: a tool's output has no old log-prob, and its value is arbitrary.
They are replaced by 0 here, by selection and not by multiplication, before any formula reads them; a NaN or an
infinity among them then reaches neither the loss nor, through the chain rule, the gradient.

Shapes: N = samples; r = response tokens of a sample on this context-parallel rank; R = all of them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.reduction import Reducer
from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean, local_responses, whole_responses
from slime.backends.megatron_utils.log_probs import get_log_probs_and_entropy, reader_columns
from slime.utils.errors import DataError

Batch = dict[str, Any]
LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


class TrainedTokens:
    """Reads columns of one micro-batch, with 0 in the place of every token that is not trained."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        masks = local_responses(batch["loss_masks"], batch["total_lengths"], batch["response_lengths"])
        self._sizes = [len(mask) for mask in masks]
        self._is_trained_T = torch.cat(masks) != 0

    def only(self, column_N: Sequence[Tensor]) -> list[Tensor]:
        """Return [r] each, 0 where a token is not trained.

        Raises:
            DataError: an entry does not have one number for each response token of its sample on this rank.
        """
        sizes = [len(values) for values in column_N]
        if sizes != self._sizes:
            raise DataError(f"a column has {sizes} entries for {self._sizes} response tokens of the samples here")
        return list(torch.where(self._is_trained_T, torch.cat(list(column_N)), 0.0).split(sizes))

    def required(self, name: str, why: str) -> list[Tensor]:
        """Return the column ``name``.

        Raises:
            DataError: the batch has none; ``why`` begins the message.
        """
        column_N = self.batch.get(name)
        if column_N is None:
            raise DataError(f"{why}, and the samples have none. {_ORIGINS[name]}")
        return self.only(column_N)

    def whole(self, column_N: Sequence[Tensor]) -> list[Tensor]:
        """Return [R] each, gathered over context-parallel ranks; differentiable.  Every rank must call."""
        return whole_responses(column_N, self.batch["total_lengths"], self.batch["response_lengths"])


_ORIGINS = {
    "advantages": "They are computed before training: drop --disable-compute-advantages-and-returns.",
    "rollout_log_probs": "The engine's log-probs come from the rollout function (sample.rollout_log_probs).",
    "ref_log_probs": "They come from a forward pass of the reference model: check --ref-load.",
    "values": "They come from the critic: --advantage-estimator ppo.",
    "returns": "They are computed before training: drop --disable-compute-advantages-and-returns.",
}
"""The origin of each column, for the message that it is missing."""


def response_log_probs(
    args: Namespace, batch: Batch, logits: Tensor, *, with_entropy: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return ``(log_prob_N, entropy_N)`` of the response tokens under the model that made ``logits``."""
    _, result = get_log_probs_and_entropy(
        logits,
        args=args,
        with_entropy=with_entropy,
        **reader_columns(batch),
        # These losses read nothing else of the logits, which the output layer does not need in its backward pass.
        overwrite_logits=True,
    )
    return result["log_probs"], result.get("entropy", [])


def reducer_of(args: Namespace, batch: Batch, loss_masks: Sequence[Tensor]) -> Reducer:
    """Return ``reduction.sum_of_sample_means`` over ``loss_masks``, with the denominators of the batch's own masks."""
    return get_sum_of_sample_mean(
        batch["total_lengths"],
        batch["response_lengths"],
        loss_masks,
        batch["rollout_mask_sums"],
        args.calculate_per_token_loss,
    )
