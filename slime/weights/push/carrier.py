"""What brings the buckets of a verified push to the engines, and what it carries.

The push itself (order, digests, failures) and the carriers are extensions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from slime.utils.errors import WeightSyncError
from slime.weights.manifest import Manifest
from slime.weights.push.engine import EngineProxy
from slime.weights.push.state import Push, TrainerRanks


class Buckets(Protocol):
    """The buckets of one push, and what they were."""

    @property
    def manifest(self) -> Manifest:
        """All tensors and buckets, the same on all ranks."""

    @property
    def constant_digests(self) -> Mapping[int, int]:
        """Digests of the constant buckets that this rank has walked over; none where a push must send them."""

    def iter_buckets(self, *, with_constants: bool = True) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's buckets; see ``slime.weights.buckets.BucketSource``."""

    def digests(self) -> dict[int, int]:
        """Return the digest of each bucket that this rank has walked over since the last time, or left out."""


class Carrier(ABC):
    """A way of buckets to the engines; it must have :meth:`open` and :meth:`send`, the rest has defaults.

    Invariant: all trainer ranks call the same methods in the same order.
    """

    by_stage = False
    """The ranks of a pipeline stage send that stage's parameters, one stage after the other; otherwise every rank
    needs the parameters of all stages."""
    needs_loader = True
    """Engines without slime's weight loader cannot take what it carries."""

    def __init__(self, ranks: TrainerRanks) -> None:
        self.ranks = ranks

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

    def write(self, push: Push, source: Buckets) -> Any:
        """Write the weights where engines can read them, and ask none of them.

        Raises:
            WeightSyncError: always, but over a disk.
        """
        raise WeightSyncError("pushes of this run are not written to disk; use --update-weight-transport disk")

    def finish(self, push: Push, *, is_served: bool) -> None:  # noqa: B027  most carriers need none
        """Tidy up after a push; collective where engines serve it, local after an error."""

    def close(self) -> None:  # noqa: B027
        """Leave what was joined."""
