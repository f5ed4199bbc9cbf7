"""Other policies that guide the one in training: the reference, and those of extensions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from slime.backends.megatron_utils.log_probs import Reader, get_log_probs_and_entropy
from slime.train_data.device_batch import DeviceBatch

Passes = Callable[[str, Reader, str], dict[str, list[Tensor]]]
"""Tag of a policy, reader, prefix -> what a pass of that policy over the rollout reads, its names behind the prefix.

Empty before the last pipeline stage.
"""
LossTerm = Callable[[Mapping[str, Any], Tensor, Sequence[Tensor]], tuple[str, float, list[Tensor]]]
"""Micro-batch, its logits, [r] log-probs of each sample -> name of the metric, weight in the loss, [r] of each sample.

The log-probs are of the same logits, with their gradient.  Tokens that are not trained may have any number.
"""


class Guide(ABC):
    """What a policy is trained towards beside the rewards; ``slime.compose`` chooses those of extensions.

    The policies themselves are ``args.frozen_policies``.
    """

    token_columns: tuple[str, ...] = ()
    """Columns that it adds with one number for each response token, which are logged."""
    loss_term: LossTerm | None = None
    """A term of the policy loss."""

    def __init__(self, args: Namespace) -> None:
        self.args = args

    @abstractmethod
    def read(self, passes: Passes, data: DeviceBatch) -> None:
        """Add to ``data`` what its policies say of the rollout; on every rank."""

    def pull(self, data: DeviceBatch, log_probs: Sequence[Tensor] | None) -> None:  # noqa: B027  a guide may do without
        """Change the advantages of any estimator, before they are whitened; on the last pipeline stage.

        Args:
            log_probs: [r] of each sample under the policy that drew it; constant.
        """


class Reference(Guide):
    """The reference model; the penalty of ``--kl-coef`` and the loss of ``--use-kl-loss`` read its log-probs."""

    def read(self, passes: Passes, data: DeviceBatch) -> None:
        """Add ``ref_log_probs``."""
        data.update(passes("ref", get_log_probs_and_entropy, "ref_"))
