"""Interfaces of the verified push: bucket sources, carriers that bring buckets to engines, and the push's state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from slime.ext.fast_push.manifest import Manifest
from slime.utils.errors import WeightSyncError
from slime.weights.push.engine import EngineProxy, Pending
from slime.weights.push.state import Push, TrainerRanks

NO_BUCKET = -1
"""Index for a step in which a rank has nothing to send and only takes part in collectives."""


class BucketSource(Protocol):
    """The buckets of one model and layout.  Constructed and used collectively on all ranks."""

    @property
    def manifest(self) -> Manifest:
        """All tensors and buckets of the push, equal on all ranks; buckets are numbered across all senders."""

    def iter_buckets(self, *, with_constants: bool = True) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's buckets with the current weights: ``(index in the manifest, flat uint8 buffer)``.

        Omits constant buckets unless ``with_constants``.

        Collective over the ranks that send in one turn: all of them exhaust the iterator, which has the same number of
        steps on each.  A step in which a rank has nothing to send is ``(NO_BUCKET, empty buffer)``.  A buffer is valid
        until the next step and starts at the first byte of its storage; engines map the same storage only once.
        Several ranks may yield the same bucket with the same bytes; each engine GPU then reads from the trainer rank
        on the same GPU.
        """


class Buckets(BucketSource, Protocol):
    """The buckets of one push, with their digests."""

    @property
    def constant_digests(self) -> Mapping[int, int]:
        """Digests of the constant buckets that this rank has iterated over; empty if the push must send them."""

    def digests(self) -> dict[int, int]:
        """Return the digests of buckets iterated over since the last call, and of constant buckets left out."""


def _no_folder(engine: EngineProxy, folder: str) -> Pending:
    raise WeightSyncError(f"this push does not read folders; got {folder}")


@dataclass
class CarriedPush(Push):
    """A push whose buckets are sent by a carrier, as this rank sees it."""

    read_folder: Callable[[EngineProxy, str], Pending] = _no_folder
    """Makes an engine load a checkpoint folder as part of this push."""
    id: str = ""
    """Identifies one attempt."""
    num_attempts: int = 0
    must_repeat: bool = False
    """True if a broadcast broke, so that it is unknown what the other engines of its group hold."""
    leaves_out_constants: bool = False
    """True if every engine holds the constant buckets and this attempt does not send them."""
    digests: dict[int, int] = field(default_factory=dict)
    """Digest of each bucket sent; after :meth:`meet`, of all ranks' buckets."""
    engine_seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, push: Push) -> CarriedPush:
        """Wrap ``push``, sharing its participants, failures, spans and metrics."""
        return cls(**vars(push))

    def in_turns(self, what: str, action: Callable[[], None], *, by_stage: bool) -> None:
        """Run ``action`` on the ranks of one pipeline stage after another, or on all ranks at once.

        Two stages in flight could reach two engines in different orders and deadlock.
        """
        for turn in range(self.ranks.num_stages if by_stage else 1):
            if (not by_stage or turn == self.ranks.stage) and not self.must_repeat:
                action()
            self.meet(what)

    def meet(self, what: str, own: Any = None) -> list[Any]:
        """Synchronize all ranks, including whether to repeat and the digests of what was sent.

        Raises:
            WeightSyncError: see :meth:`Push.meet`; also if two ranks sent different bytes as the same bucket.
        """
        told = super().meet(what, (self.must_repeat, self.digests, own))
        self.must_repeat = any(must_repeat for must_repeat, _, _ in told)
        self.digests = {}
        for rank, (_, digests, _) in enumerate(told):
            for index, digest in digests.items():
                if self.digests.setdefault(index, digest) != digest:
                    raise WeightSyncError(
                        f"trainer rank {rank} sent different bytes as bucket {index} than earlier ranks: their "
                        "copies of a parameter differ"
                    )
        return [given for *_, given in told]


class Carrier(ABC):
    """Brings buckets to the engines.  Subclasses implement :meth:`open` and :meth:`send`.

    All trainer ranks call the same methods in the same order.
    """

    by_stage = False
    """True if each pipeline stage's ranks send that stage's parameters, stage after stage; otherwise every rank needs
    the parameters of all stages."""
    needs_loader = True
    """True if only engines with slime's weight loader can receive from this carrier."""

    def __init__(self, ranks: TrainerRanks) -> None:
        self.ranks = ranks

    @abstractmethod
    def open(self, push: CarriedPush, manifest: Manifest) -> None:
        """Connect to the engines that still take part; exclude those that fail to connect.  Collective.

        Sets ``push.must_repeat`` to be called again without the excluded engines.
        """

    @abstractmethod
    def send(self, push: CarriedPush, index: int, flat: Tensor) -> None:
        """Send one bucket to all engines and wait until they have it; exclude those that do not take it.

        Every rank that sends in this turn calls this equally often, with ``NO_BUCKET`` if it has nothing to send.  The
        caller overwrites the buffer afterwards.  Sets ``push.must_repeat`` for another attempt with all buckets.
        """

    def connect(self, engines: Sequence[EngineProxy]) -> bool:
        """Set the engines for the next pushes; return whether buckets may hold slices of tensors.  Collective."""
        return False

    def prepare(self, push: CarriedPush, source: Buckets) -> Buckets:
        """Do preparations while the engines still serve, and return the buckets to send.  Collective."""
        return source

    def write(self, push: CarriedPush, source: Buckets) -> Any:
        """Write the weights where engines can read them, without contacting engines; return what they need to know.

        None from a carrier that does not use a disk.
        """
        return None

    def finish(self, push: CarriedPush, *, is_served: bool) -> None:  # noqa: B027  most carriers need none
        """Clean up after a push; collective if it succeeded (``is_served``), local after an error."""

    def close(self) -> None:  # noqa: B027
        """Leave all process groups."""
