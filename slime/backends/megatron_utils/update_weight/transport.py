"""The seam between a trainer and a way of pushing its weights.

``plain_push.PlainPush`` is the core's own; ``slime.compose`` hands a trainer another one where the flags ask for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from slime.backends.megatron_utils.update_weight.bucket_source import SentWeights
from slime.utils.errors import WeightSyncError
from slime.weights.push.engine import EngineProxy
from slime.weights.push.state import Push, PushReport, TrainerRanks


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
