"""The timeline of two samples, by hand."""

from __future__ import annotations

import json

from tools.trace_timeline_viewer import QUEUE_SLICE, trace_events, tracks_of


def event(kind, name, ts, span=None, parent=None, **attrs):
    return {"type": kind, "name": name, "ts": ts, "span_id": span, "parent_span_id": parent, "attrs": attrs}


TRACE = {
    "version": 1,
    "trace_id": "t",
    "sample_id": 5,
    "group_id": 2,
    "attempt": 1,
    "events": [
        event("span_start", "outer", 100.0, "a"),
        event("span_start", "sglang_generate", 100.5, "b", "a"),
        event("event", "tool", 101.0, None, "b", result="4"),
        event("span_end", "sglang_generate", 102.5, "b", "a", queue_time=0.25, prompt_tokens=3),
        event("span_start", "cut off", 102.75, "c", "a"),
        event("span_end", "outer", 103.0, "a"),
    ],
}


def test_spans_nest_and_carry_their_attributes():
    (track,) = tracks_of([None, TRACE, {"events": []}])
    assert (track.group_id, track.sample_id, track.attempt) == (2, 5, 1)
    assert [(one.name, one.start, one.end, one.depth, one.is_open) for one in track.slices] == [
        ("outer", 100.0, 103.0, 0, False),
        ("sglang_generate", 100.5, 102.5, 1, False),
        (QUEUE_SLICE, 100.5, 100.75, 2, False),
        ("cut off", 102.75, 103.0, 1, True),
    ]
    assert track.slices[1].attrs == {"queue_time": 0.25, "prompt_tokens": 3}
    assert track.moments == [("tool", 101.0, {"result": "4"})]


def test_trace_events_are_what_perfetto_reads():
    document = json.loads(json.dumps(trace_events(tracks_of([TRACE]))))
    slices = [item for item in document["traceEvents"] if item["ph"] == "X"]
    assert [(item["name"], item["ts"], item["dur"]) for item in slices] == [
        ("outer", 0.0, 3e6),
        ("sglang_generate", 0.5e6, 2e6),
        (QUEUE_SLICE, 0.5e6, 0.25e6),
        ("cut off", 2.75e6, 0.25e6),
    ]
    assert {(item["pid"], item["tid"]) for item in slices} == {(3, 6)}
    assert slices[-1]["args"] == {"unfinished": True}
    names = {item["name"]: item["args"] for item in document["traceEvents"] if item["ph"] == "M"}
    assert names["process_name"] == {"name": "group 2"} and names["thread_name"] == {"name": "sample 5, attempt 1"}
    (moment,) = [item for item in document["traceEvents"] if item["ph"] == "i"]
    assert (moment["name"], moment["ts"], moment["s"]) == ("tool", 1e6, "t")
    for inner, outer in zip(slices[1:3], slices[:2]):
        assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
