"""Show a rollout dump (``--save-debug-rollout-data``) as a timeline of each sample's spans.

    python tools/trace_timeline_viewer.py dump/0.pt [--rebuild] [--no-serve] [--port 9999]

Writes two files beside the dump: ``0.trace.json``, trace events for https://ui.perfetto.dev, and
``0.timeline.html``, a self-contained page; then serves the page until interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.flags.kinds import port_number
from slime.observability.dumps import read_dump
from slime.utils.errors import ConfigError, DataError
from slime.utils.http_door import PageHandler, PageServer
from tools.cli import clean_exit
from tools.terminal import say

TEMPLATE = Path(__file__).with_name("trace_timeline.html")
DATA_MARK = "/*TIMELINE*/null"
QUEUE_SLICE = "engine queue"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pt_path", type=Path, help="A rollout dump.")
    parser.add_argument("--rebuild", action="store_true", help="Write the files even if they are newer than the dump.")
    parser.add_argument(
        "--serve", action=argparse.BooleanOptionalAction, default=True, help="Serve the page on localhost afterwards."
    )
    parser.add_argument("--port", type=port_number, default=9999, help="Port of the server.")
    args = parser.parse_args(argv)
    with clean_exit():
        trace, page = build(args.pt_path, rebuild=args.rebuild)
    say(f"{trace}: open it at https://ui.perfetto.dev (Open trace file)", f"{page}: open it in a browser")
    if args.serve:
        with clean_exit():
            serve(page, args.port)


def build(dump: Path, *, rebuild: bool = False) -> tuple[Path, Path]:
    """Write the trace events and the page beside ``dump``, unless they are up to date; returns their paths.

    Raises:
        DataError: the dump is missing, or none of its samples has a trace.
    """
    if not dump.is_file():
        raise DataError(f"{dump} does not exist; it must be a file written by --save-debug-rollout-data.")
    trace, page = dump.with_suffix(".trace.json"), dump.with_suffix(".timeline.html")
    made = [path for path in (trace, page) if path.exists() and path.stat().st_mtime >= dump.stat().st_mtime]
    if len(made) == 2 and not rebuild:
        return trace, page
    tracks = tracks_of(read_traces(dump))
    if not tracks:
        raise DataError(f"{dump} holds no traces; it was written by a rollout function that does not trace samples.")
    trace.write_text(json.dumps(trace_events(tracks), default=str))
    data = json.dumps(page_data(dump.name, tracks), default=str).replace("<", "\\u003c")
    page.write_text(TEMPLATE.read_text().replace(DATA_MARK, data))
    return trace, page


def read_traces(dump: Path) -> list[Any]:
    """Return ``sample.trace`` of every sample of a dump; None for samples without one."""
    return [sample.get("trace") for sample in read_dump(dump)]


# The timeline


@dataclass
class Slice:
    """One span of one sample; times in seconds since the epoch."""

    name: str
    start: float
    end: float
    depth: int
    """Number of spans that contain it."""
    attrs: dict[str, Any] = field(default_factory=dict)
    is_open: bool = False
    """It has no end: the work was cut off, or is still running."""


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
    """Return a track for each trace (``sample.trace``), by group and sample; samples without a trace get none."""
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
    """Return the tracks in the trace-event format (``json.dump`` it).

    One process row for each prompt group, one thread row for each of its samples, one slice for each span.  Times are
    microseconds since the first event.
    """
    begin = _first(tracks)
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


def _first(tracks: Sequence[Track]) -> float:
    """Return the time of the first event."""
    slices = [one.start for track in tracks for one in track.slices]
    return min([*slices, *(time for track in tracks for _, time, _ in track.moments)], default=0.0)


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def page_data(title: str, tracks: Sequence[Track]) -> dict[str, Any]:
    """Return the page's data: rows of [name, start, end, depth, attrs], in seconds from the first event."""
    begin = _first(tracks)
    rows = []
    for track in tracks:
        slices = [
            [one.name, round(one.start - begin, 6), round(one.end - begin, 6), one.depth, one.attrs]
            for one in track.slices
        ]
        moments = [[name, round(time - begin, 6), attrs] for name, time, attrs in track.moments]
        rows.append({"group": track.group_id, "sample": track.sample_id, "slices": slices, "moments": moments})
    ends = [one[2] for row in rows for one in row["slices"]]
    end = max([*ends, *(moment[1] for row in rows for moment in row["moments"])], default=0.0)
    return {"title": title, "seconds": end, "rows": rows}


def serve(page: Path, port: int) -> None:
    """Serve the page on localhost until interrupted.

    Raises:
        ConfigError: the port is taken.
    """
    content = page.read_bytes()

    class Answer(PageHandler):
        def do_GET(self) -> None:  # noqa: N802  the name is http.server's
            self.send(200, "text/html; charset=utf-8", content, ("Cache-Control", "no-store"))

    try:
        listening = PageServer("127.0.0.1", port, Answer)
    except OSError as error:
        raise ConfigError(f"--port {port} cannot be listened on: {error.strerror}.") from error
    with listening as server:
        say(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say()


if __name__ == "__main__":
    main()
