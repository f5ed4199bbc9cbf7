"""The interface of a transport, which brings the buckets of a push to the engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from slime.weights.manifest import Manifest
from slime.weights.push.acknowledgements import Buckets
from slime.weights.push.state import Push, TrainerRanks
from slime.weights.push.verbs import EngineProxy
from slime.weights.push.wire import StockWire


@dataclass(frozen=True, kw_only=True)
class DiskOptions:
    """Settings of the transports over a shared disk."""

    root: Path
    """``--update-weight-disk-dir``."""
    model: Path
    """``--hf-checkpoint``: version 0, and the assets of every whole version."""
    has_copies: bool
    """Every host makes a copy of its own first (``--update-weight-local-checkpoint-dir``)."""
    keeps_files: bool
    """``--update-weight-disk-keep-files``."""
    goes_on: bool
    """Versions of an earlier trainer of this run lie in the folder (``--release-train``)."""
    encoding: str
    """``--update-weight-delta-encoding``."""
    checksum: str
    """``--update-weight-delta-checksum``."""
    on_written: Callable[[Path, Sequence[Any]], None] | None = None
    """Called on every rank with a version's folder and the engines' handles, before engines read it."""


@dataclass(frozen=True, kw_only=True)
class TransportOptions:
    """Arguments of all transports; each takes what it needs."""

    ranks: TrainerRanks
    wire: StockWire
    disk: DiskOptions | None = None


class Transport(ABC):
    """A way of buckets to the engines; it must have :meth:`open` and :meth:`send`, the rest has defaults.

    Invariant: all trainer ranks call the same methods in the same order.
    """

    by_stage = False
    """The ranks of a pipeline stage send that stage's parameters, one stage after the other; otherwise every rank
    needs the parameters of all stages."""

    def __init__(self, options: TransportOptions) -> None:
        self.ranks, self.wire = options.ranks, options.wire

    @abstractmethod
    def open(self, push: Push, manifest: Manifest) -> None:
        """Have the paths to the engines that are still in the push; exclude those that do not come.  Collective.

        ``push.must_repeat`` asks for another call without the engines that were excluded.
        """

    @abstractmethod
    def send(self, push: Push, index: int, flat: Tensor) -> None:
        """Bring one bucket to all engines and wait until they have it; exclude those that do not take it.

        Every rank that sends in this turn calls it equally often, with ``NO_BUCKET`` where it has nothing to send.
        The buffer is written again afterwards.  ``push.must_repeat`` asks for another attempt with all buckets.
        """

    def connect(self, engines: Sequence[EngineProxy]) -> bool:
        """Learn which engines come next; return True where buckets may hold slices of tensors.  Collective."""
        return False

    def prepare(self, push: Push, source: Buckets) -> Buckets:
        """Do what can be done while the engines still serve, and return the buckets to send.  Collective."""
        return source

    def finish(self, push: Push, *, is_served: bool) -> None:  # noqa: B027  most transports need none
        """Tidy up after a push; collective where engines serve it, local after an error."""

    def close(self) -> None:  # noqa: B027
        """Leave what was joined."""
