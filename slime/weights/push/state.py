"""One push: the participating trainer ranks, its state and steps, and its report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from slime.utils.distributed_utils import get_gloo_group
from slime.utils.errors import DeadlineError, EngineDiedError, ProcessError, WeightSyncError
from slime.weights.push.engine import EngineProxy
from slime.weights.push.participants import PUSH_FAILURES, ExcludedEngine, Participants, reason_of

Span = tuple[str, float, float]
"""A step's name, begin and end, in seconds since the push began."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """Sizes and times of one push, counting only what was sent, and the engines that it excluded."""

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
    """Steps of this rank, including waits for all ranks; "begin", "fill" and "send" are parts of "buckets"."""
    engine_seconds: dict[str, float] = field(default_factory=dict)
    """Part of the work -> seconds on the devices of the slowest engine."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the transport."""

    @property
    def seconds(self) -> dict[str, float]:
        """Step -> total seconds."""
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
    """This process's position among the pushing ranks; by default it is the only one."""

    rank: int = 0
    world_size: int = 1
    stage: int = 0
    """Pipeline stage."""
    num_stages: int = 1
    is_source: bool = True
    """True on the rank that acts for its pipeline stage: rank 0 of data, context and tensor parallelism."""
    ranks_per_host: int = 1

    def gather(self, own: Any) -> list[Any]:
        """All-gather ``own``; return every rank's value in rank order.  Collective."""
        told: list[Any] = [own] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(told, own, group=get_gloo_group())
        return told

    def from_main(self, own: Any) -> Any:
        """Broadcast: return rank 0's ``own``.  Collective."""
        told = [own]
        if self.world_size > 1:
            dist.broadcast_object_list(told, src=0, group=get_gloo_group())
        return told[0]


@dataclass
class Push:
    """A push in progress, as this rank sees it."""

    version: str
    participants: Participants
    ranks: TrainerRanks = field(default_factory=TrainerRanks)
    repacks: bool = False
    """True if engines repack quantized weights on load; engines without slime's loader must undo that for a push."""
    checks: bool = False
    """``--check-weight-update-equal``: overwrite all weights first, and compare them afterwards."""
    is_resend: bool = False
    """True if this push repeats the last one for engines that missed it."""
    log_level: int = logging.INFO
    """Level of the line about this push."""
    failures: list[Exception] = field(default_factory=list)
    """Errors of this rank that are no engine's fault; the next :meth:`meet` raises the first on all ranks."""
    spans: list[Span] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Record the block's begin and end as a span."""
        begin_s = self.participants.clock.elapsed_s
        try:
            yield
        finally:
            self.spans.append((name, begin_s, self.participants.clock.elapsed_s))

    def on_main_rank(self, what: str, action: Callable[[], None]) -> None:
        """Run ``action`` on rank 0 while the other ranks wait for it."""
        self.run_together(what, action if self.ranks.rank == 0 else None)

    def run_together(self, what: str, action: Callable[[], None] | None) -> None:
        """Run this rank's ``action``, if any, and wait until all ranks have run theirs."""
        if action is not None:
            try:
                action()
            except PUSH_FAILURES as error:
                self.failures.append(error)
        self.meet(what)

    def meet(self, what: str, own: Any = None) -> list[Any]:
        """Synchronize all ranks and their exclusions; return every rank's ``own`` in rank order.

        Raises:
            WeightSyncError: a rank failed (all ranks raise the first failure), or no engine is left.
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

    # Requests of rank 0 to the engines in every push; an engine that does not answer is excluded

    def pause(self) -> None:
        """Pause generation and flush the prefix cache.  Pauses excluded engines too, because they must not serve."""
        engines = self.participants
        engines.ask("pausing", lambda engine: engine.pause_generation(), engines.engines.values())
        engines.ask("flushing its cache", lambda engine: engine.flush_cache())

    def require_repacking(self, engines: Sequence[EngineProxy]) -> None:
        """Check that engines can undo and redo their repacking of weights, before anything is paused.

        Raises:
            WeightSyncError: an engine cannot.
        """
        for engine in engines:
            try:
                # Asks for neither undo nor redo, so an engine with the endpoint does nothing.
                engine.post_process_weights().wait(self.participants.clock.step_s)
            except (EngineDiedError, DeadlineError) as error:
                self.participants.exclude(engine.index, f"{reason_of(error)} (while asking for a push's needs)")
            except ProcessError as error:
                raise WeightSyncError(
                    "--hf-checkpoint holds compressed-tensors weights, which engines repack when they load them; "
                    f"engine {engine.index} cannot undo that for a push ({error}). Start it with slime's "
                    "--custom-weight-loader, which can, or use an SGLang with /post_process_weights or a checkpoint "
                    "in FP8 by blocks (tools/convert_hf_to_fp8.py)"
                ) from error

    def undo_repacking(self, engines: Sequence[EngineProxy]) -> None:
        """Make engines convert their weights to the checkpoint's layout."""
        undo = "undoing its repacking of weights"
        self.participants.ask(undo, lambda one: one.post_process_weights(restore_weights_before_load=True), engines)

    def repack(self, engines: Sequence[EngineProxy]) -> None:
        """Make engines convert their weights to the layout that kernels read."""
        redo = "repacking weights"
        self.participants.ask(redo, lambda one: one.post_process_weights(post_process_quantization=True), engines)

    def require_version(self) -> None:
        """Exclude engines that do not report the push's version."""
        held = self.participants.ask("telling its version", lambda engine: engine.get_weight_version())
        for index, version in held.items():
            if str(version) != self.version:
                self.participants.exclude(
                    index, f"it holds version {version!r} after the push of version {self.version!r}"
                )

    def continue_generation(self) -> None:
        """Resume generation."""
        self.participants.ask("continuing", lambda engine: engine.continue_generation())

    def report(self, *, num_tensors: int, num_buckets: int, num_bytes: int, **more: Any) -> PushReport:
        """Return the push's report, given what was sent; ``more`` sets further fields."""
        return PushReport(
            int(self.version), num_tensors, num_buckets, num_bytes, self.participants.clock.elapsed_s,
            num_engines=len(self.participants.good), excluded=self.participants.excluded, spans=tuple(self.spans),
            metrics=self.metrics, **more,
        )  # fmt: skip
