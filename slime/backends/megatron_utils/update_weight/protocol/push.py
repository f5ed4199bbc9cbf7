"""One push: what is known while it is under way, and what is told of it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from slime.backends.megatron_utils.update_weight.protocol.roster import PushClock, Roster
from slime.weights.receiver import ExcludedEngine


@dataclass(frozen=True, slots=True)
class PushReport:
    """What one push moved, and whom it left out."""

    version: int
    num_tensors: int
    num_buckets: int
    num_bytes: int
    elapsed_s: float
    num_engines: int = 0
    """Engines that serve the new version."""
    num_attempts: int = 1
    fenced: tuple[ExcludedEngine, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    """By step, meetings of all ranks included; "begin" and "hand over" are parts of "publish", the rest of which is
    filling buckets."""


@dataclass
class Push:
    """A push under way, as this rank sees it."""

    version: str
    roster: Roster
    clock: PushClock
    id: str = ""
    """Names one attempt."""
    num_attempts: int = 0
    must_repeat: bool = False
    """A broadcast broke: what the others of its group hold is unknown."""
    failures: list[Exception] = field(default_factory=list)
    """What went wrong on this rank through no engine's fault; the next meeting raises it on all ranks."""
    digests: dict[int, int] = field(default_factory=dict)
    """Digest of each bucket that was sent, of all ranks once they have met."""
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to those of a step."""
        started_s = monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + monotonic() - started_s
