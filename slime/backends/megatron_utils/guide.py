"""Frozen policies that guide the one in training: the reference, and those that extensions add."""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from slime.backends.megatron_utils.log_probs import Reader, get_log_probs_and_entropy
from slime.train_data.device_batch import DeviceBatch

Passes = Callable[[str, Reader, str], dict[str, list[Tensor]]]
"""(policy tag, reader, prefix) -> columns that the reader reads in a pass of that policy over the rollout.

The prefix is prepended to the column names.  Empty on all but the last pipeline stage.
"""
LossTerm = Callable[[Mapping[str, Any], Tensor, Sequence[Tensor]], tuple[str, float, list[Tensor]]]
"""(micro-batch, its logits, log-probs [r] per sample) -> (metric name, weight in the loss, values [r] per sample).

The log-probs are computed from these logits and carry a gradient.  Values of untrained tokens are ignored.
"""


class Guide(ABC):
    """A training target besides the rewards; ``slime.compose`` chooses the guides of extensions.

    ``args.frozen_policies`` lists the policies that extensions' guides read.
    """

    token_columns: tuple[str, ...] = ()
    """Columns it adds with one number per response token; they are logged."""
    loss_term: LossTerm | None = None
    """An additional term of the policy loss."""

    def __init__(self, args: Namespace) -> None:
        self.args = args

    @abstractmethod
    def read(self, passes: Passes, data: DeviceBatch) -> None:
        """Add the columns of its policies to ``data``.  Called on every rank."""

    def pull(self, data: DeviceBatch, log_probs: Sequence[Tensor] | None) -> None:  # noqa: B027  a guide may do without
        """Change the advantages, whatever the estimator, before they are whitened.  Called on the last pipeline stage.

        Args:
            log_probs: [r] per sample, without gradient: the engine's with ``--use-rollout-logprobs``, otherwise those
                that the trainer computed before training.
        """


class Reference(Guide):
    """The reference model; the penalty of ``--kl-coef`` and the loss of ``--use-kl-loss`` read its log-probs."""

    def read(self, passes: Passes, data: DeviceBatch) -> None:
        """Add ``ref_log_probs``."""
        data.update(passes("ref", get_log_probs_and_entropy, "ref_"))
