"""A record of this process, for tests."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from slime.ext.record.run_record import RecordSink
from slime.observability import telemetry
from slime.observability.telemetry import event, span, stop
from slime.utils.types import Sample

__all__ = ["dropped", "evaluation", "event", "rollout", "span", "start", "stop", "trained"]


def start(args: Namespace, process: str, *, primary: bool = False, **flags: Any) -> RecordSink:
    """Begin the record, or join it; ``flags`` are added to ``args``."""
    telemetry.start(Namespace(**vars(args) | flags), process, (RecordSink,), primary=primary)
    (*_, sink) = telemetry._Stream.sinks
    assert isinstance(sink, RecordSink)
    return sink


def rollout(
    rollout_id: int, samples: Sequence[Sample], rewards: Sequence[float] | None = None, *, is_loaded: bool = False
) -> None:
    facts = {"samples": samples, "rewards": rewards, "is_loaded": is_loaded}
    telemetry.samples("rollout", rollout_id=rollout_id, **facts)


def dropped(samples: Sequence[Sample], reason: str) -> None:
    telemetry.samples("dropped", samples=samples, reason=reason)


def evaluation(rollout_id: int | None, data: Mapping[str, Mapping[str, Any]]) -> None:
    telemetry.samples("evaluation", rollout_id=rollout_id, data=data)


def trained(
    rollout_id: int,
    rank: int,
    positions: Sequence[int],
    columns: Mapping[str, Sequence[Any]],
    micro_batches: Sequence[int] = (),
) -> None:
    facts = {"positions": positions, "columns": columns, "micro_batches": micro_batches}
    telemetry.samples("trained", rollout_id=rollout_id, rank=rank, **facts)
