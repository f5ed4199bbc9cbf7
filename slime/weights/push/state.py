"""One push: the trainer ranks that take part, its state while it is under way, and its report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from slime.utils.distributed_utils import get_gloo_group
from slime.utils.errors import WeightSyncError
from slime.weights.manifest import BucketEntry
from slime.weights.push.participants import PUSH_FAILURES, ExcludedEngine, Participants, reason_of

Span = tuple[str, float, float]
"""A step, and the seconds from the beginning of the push at which it began and ended."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """The sizes and times of one push, what it left out not counted, and the engines that it excluded."""

    version: int
    num_tensors: int
    num_buckets: int
    num_bytes: int
    elapsed_s: float
    num_engines: int = 0
    """Engines that serve the new version."""
    num_attempts: int = 1
    excluded: tuple[ExcludedEngine, ...] = ()
    spans: tuple[Span, ...] = ()
    """Steps of this rank, meetings of all ranks included; "begin", "fill" and "send" are parts of "buckets"."""
    engine_seconds: dict[str, float] = field(default_factory=dict)
    """Of the slowest engine's devices, by part; see ``EngineVerbs.acknowledge_weight_update``."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the transport."""

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by step."""
        found: dict[str, float] = {}
        for step, begin_s, end_s in self.spans:
            found[step] = found.get(step, 0.0) + end_s - begin_s
        return found

    def as_metrics(self) -> dict[str, float]:
        """Return ``perf/weight_push_*`` and the transport's own metrics."""
        return {
            "perf/weight_push_s": self.elapsed_s,
            "perf/weight_push_bytes": float(self.num_bytes),
            "perf/weight_push_excluded": float(len(self.excluded)),
            **self.metrics,
        }


@dataclass(frozen=True, kw_only=True)
class TrainerRanks:
    """The place of this process among those that push; by default it is the only one."""

    rank: int = 0
    world_size: int = 1
    stage: int = 0
    """Pipeline stage."""
    num_stages: int = 1
    is_source: bool = True
    """The one rank of its stage that acts for it: rank 0 of data, context and tensor parallelism."""
    ranks_per_host: int = 1

    def gather(self, own: Any) -> list[Any]:
        """Return what every rank gives, in rank order; collective."""
        told: list[Any] = [own] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(told, own, group=get_gloo_group())
        return told

    def from_main(self, own: Any) -> Any:
        """Return what rank 0 gives; collective."""
        told = [own]
        if self.world_size > 1:
            dist.broadcast_object_list(told, src=0, group=get_gloo_group())
        return told[0]


@dataclass
class Push:
    """A push under way, as this rank sees it."""

    version: str
    participants: Participants
    ranks: TrainerRanks = field(default_factory=TrainerRanks)
    repacks: bool = False
    """The engines repack quantised weights when they load them; those without our loader must undo that for a push."""
    checks: bool = False
    """``--check-weight-update-equal``: all weights are overwritten first, and compared afterwards."""
    is_resend: bool = False
    """The engines missed the last push."""
    failures: list[Exception] = field(default_factory=list)
    """Errors of this rank that are no engine's fault; the next meeting raises it on all ranks."""
    spans: list[Span] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Note the begin and end of the block."""
        begin_s = self.participants.clock.elapsed_s
        try:
            yield
        finally:
            self.spans.append((name, begin_s, self.participants.clock.elapsed_s))

    def on_main_rank(self, what: str, action: Callable[[], None]) -> None:
        """Run ``action`` on rank 0 while the others wait for its end."""
        self.run_together(what, action if self.ranks.rank == 0 else None)

    def run_together(self, what: str, action: Callable[[], None] | None) -> None:
        """Run this rank's ``action``, if it has one, and wait for those of all ranks."""
        if action is not None:
            try:
                action()
            except PUSH_FAILURES as error:
                self.failures.append(error)
        self.meet(what)

    def meet(self, what: str, own: Any = None) -> list[Any]:
        """Meet all ranks: all know then who is excluded; return what every rank gives as ``own``.

        Raises:
            WeightSyncError: a rank failed (the first failure of any is raised on all), or no engine is left.
        """
        text = reason_of(self.failures[0]) if self.failures else None
        told = self.ranks.gather((text, self.participants.reasons, own))
        for rank, (reported, *_) in enumerate(told):
            if reported is not None:
                raise WeightSyncError(f"trainer rank {rank} failed while {what}. {reported}") from next(
                    iter(self.failures), None
                )
        self.participants.merge([reasons for _, reasons, _ in told])
        if self.participants.engines and not self.participants.good:
            listed = "; ".join(f"engine {engine.index}: {engine.reason}" for engine in self.participants.excluded)
            raise WeightSyncError(f"no engine took weight version {self.version} ({what}). {listed}")
        return [given for *_, given in told]

    def report(self, sent: Sequence[BucketEntry], **more: Any) -> PushReport:
        """Return the report of a push that sent these buckets; ``more`` are other fields of it."""
        return PushReport(
            int(self.version), len({part.name for bucket in sent for part in bucket.slices}), len(sent),
            sum(bucket.num_bytes for bucket in sent), self.participants.clock.elapsed_s,
            num_engines=len(self.participants.good), excluded=self.participants.excluded, spans=tuple(self.spans),
            metrics=self.metrics, **more,
        )  # fmt: skip
