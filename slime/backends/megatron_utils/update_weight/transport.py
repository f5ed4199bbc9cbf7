"""The interface between a trainer and an implementation of weight pushes.

``plain_push.PlainPush`` is the core's implementation; ``slime.compose`` chooses another if the flags request it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.megatron_to_hf import HfForm
from slime.backends.megatron_utils.update_weight.gather import HostWeights, iter_hf_tensors
from slime.utils.errors import WeightSyncError
from slime.weights.push.engine import EngineProxy
from slime.weights.push.state import Push, PushReport, TrainerRanks
from slime.weights.quantize import Quantizer


@dataclass(frozen=True, kw_only=True, slots=True)
class SentWeights:
    """The weights of a push, and the form in which engines load them."""

    form: HfForm
    """Determines names and shapes."""
    model: Sequence[torch.nn.Module]
    """This rank's chunks."""
    get_host_weights: Callable[[], HostWeights | None] = lambda: None
    """Returns host copies to read instead of the live parameters, or None to read the parameters."""
    dtype: torch.dtype
    """Dtype of floating-point tensors that are not quantized."""
    quantizer: Quantizer | None = None
    """Quantizes the tensors that engines hold quantized; None if there are none."""
    bucket_bytes: int
    """``--update-weight-buffer-size``: the largest size of a bucket with several tensors, in bytes."""
    constants: frozenset[str] = frozenset()
    """:attr:`Shard.name` of parameters that training never changes, the same on all ranks; they get their own buckets.
    """

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(iter(self.model[0].parameters())).device

    def whole_tensors(
        self, *, across_stages: bool, only: Container[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield HF name and value of the tensors before quantization; arguments as in ``gather.iter_full_tensors``."""
        return iter_hf_tensors(
            self.form,
            self.model,
            dtype=self.dtype,
            host_weights=self.get_host_weights(),
            across_stages=across_stages,
            only=only,
        )

    def as_sent(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Return the tensors sent for one HF tensor: itself, or the quantizer's output."""
        if self.quantizer is None or not self.quantizer.is_quantized(name):
            return [(name, tensor)]
        return self.quantizer.quantize(name, tensor)


class Transport(ABC):
    """An implementation of weight pushes, on one trainer rank; subclasses define :meth:`connect` and :meth:`send`.

    Invariant: all trainer ranks call the same methods in the same order.
    """

    sends_model = True
    """It sends the model's own weights."""

    @abstractmethod
    def connect(self, engines: Sequence[EngineProxy], weights: SentWeights) -> None:
        """Set the engines to push to, and the weights with their form."""

    @abstractmethod
    def send(self, push: Push) -> PushReport:
        """Send the current weights to the engines, which then serve them under the push's version.

        Afterwards, even after an error, the push's participants record which engines failed and why.

        Raises:
            WeightSyncError: no engine serves the weights; in some transports, if one engine does not.
        """

    def write(self, push: Push) -> Any:
        """Write the current weights where engines can read them later; return what the engines need to read them.

        Raises:
            WeightSyncError: writing failed; always if the transport does not use a disk.
        """
        raise WeightSyncError("pushes of this run are not written to disk; use --update-weight-transport disk")

    def close(self) -> None:  # noqa: B027  some transports have no group
        """Leave the groups with the engines."""


MakeTransport = Callable[[Namespace, TrainerRanks], Transport]
"""Builds a rank's transport from the flags; collective."""
