"""What brings the buckets of a verified push to the engines, what it carries, and the state of such a push."""

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
"""Index of a step in which a rank has nothing to send, and only takes part in the others' collectives."""


class BucketSource(Protocol):
    """The buckets of one model and layout.  Made on all ranks at once, and used in step."""

    @property
    def manifest(self) -> Manifest:
        """All tensors and buckets of the push, the same on all ranks; buckets are numbered over all senders."""

    def iter_buckets(self, *, with_constants: bool = True) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's buckets with the weights of now: ``(index in the manifest, flat uint8 buffer)``.

        Without the constant ones where these are not wanted.

        Collective over the ranks that send in one turn: all of them walk the iterator to its end, and it gives each of
        them equally many steps.  A step in which a rank has nothing to send is ``(NO_BUCKET, empty buffer)``.  One
        buffer is valid at a time: until the next step.  It starts at the first byte of its memory, and the same memory
        again is mapped by engines only once.  The same bucket may come from several ranks (each engine GPU
        then takes the one of the trainer rank beside it); its bytes are then the same on all of them.
        """


class Buckets(BucketSource, Protocol):
    """The buckets of one push, and what they were."""

    @property
    def constant_digests(self) -> Mapping[int, int]:
        """Digests of the constant buckets that this rank has walked over; none where a push must send them."""

    def digests(self) -> dict[int, int]:
        """Return the digest of each bucket that this rank has walked over since the last time, or left out."""


def _no_folder(engine: EngineProxy, folder: str) -> Pending:
    raise WeightSyncError(f"this push is not one of folders, such as {folder}")


@dataclass
class CarriedPush(Push):
    """A push whose buckets a carrier brings, as this rank sees it."""

    read_folder: Callable[[EngineProxy, str], Pending] = _no_folder
    """Has an engine load a checkpoint folder, as a part of this push."""
    id: str = ""
    """Names one attempt."""
    num_attempts: int = 0
    must_repeat: bool = False
    """A broadcast broke: what the others of its group hold is unknown."""
    leaves_out_constants: bool = False
    """Every engine holds the constant buckets, so that this attempt does not send them."""
    digests: dict[int, int] = field(default_factory=dict)
    """Digest of each bucket that was sent, of all ranks once they have met."""
    engine_seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, push: Push) -> CarriedPush:
        """Return the same push, with which ``push`` shares its participants, failures, spans and metrics."""
        return cls(**vars(push))

    def in_turns(self, what: str, action: Callable[[], None], *, by_stage: bool) -> None:
        """Let the ranks of each pipeline stage act, stage after stage, or all of them at once.

        Two stages in flight would reach two engines in different orders, and both would wait for ever.
        """
        for turn in range(self.ranks.num_stages if by_stage else 1):
            if (not by_stage or turn == self.ranks.stage) and not self.must_repeat:
                action()
            self.meet(what)

    def meet(self, what: str, own: Any = None) -> list[Any]:
        """Meet all ranks: all know then also whether to repeat, and the digests of what was sent.

        Raises:
            WeightSyncError: also where two ranks sent different bytes as the same bucket.
        """
        told = super().meet(what, (self.must_repeat, self.digests, own))
        self.must_repeat = any(must_repeat for must_repeat, _, _ in told)
        self.digests = {}
        for rank, (_, digests, _) in enumerate(told):
            for index, digest in digests.items():
                if self.digests.setdefault(index, digest) != digest:
                    raise WeightSyncError(
                        f"trainer rank {rank} sent other bytes as bucket {index} than the ranks before it: their "
                        "copies of a parameter differ"
                    )
        return [given for *_, given in told]


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
    def open(self, push: CarriedPush, manifest: Manifest) -> None:
        """Have the paths to the engines that are still in the push; exclude those that do not come.  Collective.

        ``push.must_repeat`` asks for another call without the engines that were excluded.
        """

    @abstractmethod
    def send(self, push: CarriedPush, index: int, flat: Tensor) -> None:
        """Bring one bucket to all engines and wait until they have it; exclude those that do not take it.

        Every rank that sends in this turn calls it equally often, with ``NO_BUCKET`` where it has nothing to send.
        The buffer is written again afterwards.  ``push.must_repeat`` asks for another attempt with all buckets.
        """

    def connect(self, engines: Sequence[EngineProxy]) -> bool:
        """Learn which engines come next; return True where buckets may hold slices of tensors.  Collective."""
        return False

    def prepare(self, push: CarriedPush, source: Buckets) -> Buckets:
        """Do what can be done while the engines still serve, and return the buckets to send.  Collective."""
        return source

    def write(self, push: CarriedPush, source: Buckets) -> Any:
        """Write the weights where engines can read them, ask none of them, and return what these need to know.

        None from a carrier that uses no disk.
        """
        return None

    def finish(self, push: CarriedPush, *, is_served: bool) -> None:  # noqa: B027  most carriers need none
        """Tidy up after a push; collective where engines serve it, local after an error."""

    def close(self) -> None:  # noqa: B027
        """Leave what was joined."""
