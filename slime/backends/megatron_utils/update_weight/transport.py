"""The seam between a trainer and a way of pushing its weights.

``plain_push.PlainPush`` is the core's own; ``slime.compose`` hands a trainer another one where the flags ask for it.
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
    """The weights of a push, and the form in which engines take them."""

    form: HfForm
    """Decides names and shapes."""
    model: Sequence[torch.nn.Module]
    """This rank's chunks."""
    get_host_weights: Callable[[], HostWeights | None] = lambda: None
    """Gives host copies of the parameters to read instead of the live ones; None reads these."""
    dtype: torch.dtype
    """Of floating-point tensors that are not quantised."""
    quantizer: Quantizer | None = None
    """The quantizer of the tensors that engines hold quantized; None for none."""
    bucket_bytes: int
    """``--update-weight-buffer-size``: no bucket of several tensors is larger."""
    constants: frozenset[str] = frozenset()
    """:attr:`Shard.name` of parameters that no step changes, the same on all ranks; their buckets are constant."""

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
        """Return what engines get of a tensor: itself, or what the quantizer makes of it."""
        if self.quantizer is None or not self.quantizer.is_quantized(name):
            return [(name, tensor)]
        return self.quantizer.quantize(name, tensor)


class Transport(ABC):
    """A way of pushing, on one trainer rank; it must have :meth:`connect` and :meth:`send`.

    Invariant: all trainer ranks call the same methods in the same order.
    """

    sends_model = True
    """What it sends are the model's own weights."""

    @abstractmethod
    def connect(self, engines: Sequence[EngineProxy], weights: SentWeights) -> None:
        """Take ``engines`` as those to push to from now on, in the form that ``weights`` says."""

    @abstractmethod
    def send(self, push: Push) -> PushReport:
        """Have the engines serve the present weights under the version of the push.

        Afterwards, also after an error, the push's participants say which engines failed and why.

        Raises:
            WeightSyncError: no engine serves them, or (of some transports) one of them does not.
        """

    def write(self, push: Push) -> Any:
        """Write the present weights where engines can read them later, and return what these need to know.

        Raises:
            WeightSyncError: always, where weights travel by no disk.
        """
        raise WeightSyncError("pushes of this run are not written to disk; use --update-weight-transport disk")

    def close(self) -> None:  # noqa: B027  some have joined nothing
        """Leave the groups with the engines."""


MakeTransport = Callable[[Namespace, TrainerRanks], Transport]
"""Makes the transport of a rank from flags; collective."""
