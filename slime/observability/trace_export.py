"""Traces of samples -> a timeline: trace-event JSON, which ui.perfetto.dev and chrome://tracing open.

One process row for each prompt group, one thread row for each of its samples, one slice for each span.  Times are
microseconds since the first event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

QUEUE_SLICE = "engine queue"


@dataclass
class Slice:
    """One span of one sample; times in seconds since the epoch."""

    name: str
    start: float
    end: float
    depth: int
    """Spans that contain it."""
    attrs: dict[str, Any] = field(default_factory=dict)
    is_open: bool = False
    """It never ended: the work was cut off, or goes on."""


@dataclass
class Track:
    """The timeline of one sample."""

    group_id: int
    sample_id: int
    attempt: int
    slices: list[Slice] = field(default_factory=list)
    moments: list[tuple[str, float, dict[str, Any]]] = field(default_factory=list)
    """(name, time, attributes) of single events."""


def tracks_of(traces: Sequence[Mapping[str, Any] | None]) -> list[Track]:
    """Return a track for each trace (``sample.trace``), by group and sample; samples without one have none."""
    tracks = [
        _track(trace, position)
        for position, trace in enumerate(traces)
        if isinstance(trace, Mapping) and trace.get("events")
    ]
    return sorted(tracks, key=lambda track: (track.group_id, track.sample_id))


def _track(trace: Mapping[str, Any], position: int) -> Track:
    sample_id, group_id = trace.get("sample_id"), trace.get("group_id")
    track = Track(
        group_id=-1 if group_id is None else group_id,
        sample_id=position if sample_id is None else sample_id,
        attempt=trace.get("attempt", 0),
    )
    events = list(trace["events"])
    last = max(event["ts"] for event in events)
    open_slices: dict[str, Slice] = {}
    depths: dict[str, int] = {}
    for event in events:
        attrs = dict(event.get("attrs") or {})
        if event["type"] == "event":
            track.moments.append((event["name"], event["ts"], attrs))
        elif event["type"] == "span_start":
            depth = depths.get(event.get("parent_span_id") or "", -1) + 1
            depths[event["span_id"]] = depth
            opened = Slice(event["name"], event["ts"], last, depth, attrs, is_open=True)
            open_slices[event["span_id"]] = opened
            track.slices.append(opened)
        elif event["type"] == "span_end" and event["span_id"] in open_slices:
            ended = open_slices[event["span_id"]]
            ended.end, ended.is_open = event["ts"], False
            ended.attrs |= attrs
    for parent in list(track.slices):
        track.slices.extend(_queueing(parent))
    track.slices.sort(key=lambda one: (one.start, one.depth))
    return track


def _queueing(parent: Slice) -> Iterator[Slice]:
    """Yield the queueing that an engine reported."""
    queued = parent.attrs.get("queue_time")
    if isinstance(queued, int | float) and queued > 0:
        yield Slice(QUEUE_SLICE, parent.start, min(parent.start + queued, parent.end), parent.depth + 1)


def trace_events(tracks: Sequence[Track]) -> dict[str, Any]:
    """Return the tracks as an object in the trace-event format (``json.dump`` it)."""
    begin = min((one.start for track in tracks for one in track.slices), default=0.0)
    begin = min([begin, *(moment[1] for track in tracks for moment in track.moments)])
    events: list[dict[str, Any]] = []
    named: set[int] = set()
    for track in tracks:
        pid, tid = track.group_id + 1, track.sample_id + 1
        if pid not in named:
            named.add(pid)
            group = "no group" if track.group_id < 0 else f"group {track.group_id}"
            events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": group}})
            events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        label = f"sample {track.sample_id}" + (f", attempt {track.attempt}" if track.attempt else "")
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": label}})
        for one in track.slices:
            attrs = {**one.attrs, "unfinished": True} if one.is_open else one.attrs
            events.append(
                {
                    "ph": "X", "cat": "rollout", "name": one.name, "pid": pid, "tid": tid,
                    "ts": _microseconds(one.start - begin), "dur": _microseconds(max(one.end - one.start, 0.0)),
                    "args": attrs,
                }
            )  # fmt: skip
        for name, moment, attrs in track.moments:
            events.append(
                {
                    "ph": "i", "s": "t", "cat": "rollout", "name": name, "pid": pid, "tid": tid,
                    "ts": _microseconds(moment - begin), "args": attrs,
                }
            )  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"begin_s": begin}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)
