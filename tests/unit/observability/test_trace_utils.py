"""Traces nest, survive serialization, and never break the work."""

import asyncio

import pytest

from slime.observability.trace_utils import (
    build_sglang_meta_trace_attrs,
    trace_event,
    trace_function,
    trace_span,
)
from slime.utils.types import Sample


def names_and_parents(sample: Sample) -> list[tuple[str, str, bool]]:
    events = sample.trace["events"]  # type: ignore[attr-defined]
    return [(event["type"], event["name"], event["parent_span_id"] is not None) for event in events]


def test_a_span_inside_a_span_is_its_child() -> None:
    sample = Sample(index=3, group_index=1)
    with trace_span(sample, "outer") as span:
        with trace_span(sample, "inner", attrs={"k": 1}):
            trace_event(sample, "moment")
        span.update({"tokens": 5})
    assert names_and_parents(sample) == [
        ("span_start", "outer", False),
        ("span_start", "inner", True),
        ("event", "moment", True),
        ("span_end", "inner", True),
        ("span_end", "outer", False),
    ]
    trace = sample.trace  # type: ignore[attr-defined]
    assert (trace["sample_id"], trace["group_id"]) == (3, 1)
    assert trace["events"][-1]["attrs"] == {"tokens": 5}


def test_an_error_of_the_work_is_noted_and_passes_through() -> None:
    sample = Sample()
    with pytest.raises(ValueError, match="no"):
        with trace_span([sample], "work"):
            raise ValueError("no")
    assert sample.trace["events"][-1]["attrs"]["error"] == "ValueError: no"  # type: ignore[attr-defined]


def test_tasks_that_interleave_keep_their_own_parents() -> None:
    @trace_function("generate", target="sample")
    async def generate(args: object, sample: Sample) -> None:
        await asyncio.sleep(0)
        trace_event(sample, "token")
        await asyncio.sleep(0)

    samples = [Sample(index=i) for i in range(3)]

    async def everything() -> None:
        await asyncio.gather(*(generate(None, sample) for sample in samples))

    asyncio.run(everything())
    for sample in samples:
        start, token, _ = sample.trace["events"]  # type: ignore[attr-defined]
        assert token["parent_span_id"] == start["span_id"]


def test_phases_of_a_disaggregated_call_are_its_child_spans() -> None:
    meta = {
        "pd_prefill_bootstrap_queue_duration": 0.5,
        "pd_prefill_forward_duration": 1.0,
        "pd_decode_transfer_duration": 1.75,
        "pd_decode_forward_duration": 2.0,
        "pd_decode_retry_count": 3,
        "pd_prefill_transfer_speed_gb_s": 9.0,
    }
    sample = Sample()
    with trace_span(sample, "sglang_generate") as span:
        span.update(build_sglang_meta_trace_attrs(meta))
    events = sample.trace["events"]
    (parent,) = (event for event in events if event["type"] == "span_end" and event["name"] == "sglang_generate")
    starts = {e["name"]: e for e in events if e["type"] == "span_start" and e["parent_span_id"] == parent["span_id"]}
    ends = {event["span_id"]: event["ts"] for event in events if event["type"] == "span_end"}
    seconds = {name: round(ends[event["span_id"]] - event["ts"], 6) for name, event in starts.items()}
    assert seconds == {
        "prefill: bootstrap_queue": 0.5,
        "prefill: forward": 1.0,
        "decode: transfer": 1.75,
        "decode: forward": 2.0,
    }
    assert starts["prefill: bootstrap_queue"]["ts"] == starts["decode: transfer"]["ts"]
    assert starts["prefill: forward"]["ts"] == ends[starts["prefill: bootstrap_queue"]["span_id"]]
    assert abs(ends[starts["decode: forward"]["span_id"]] - parent["ts"]) < 1.0
    assert {name: parent["attrs"][name] for name in meta} == meta  # where the metrics read them


def test_attributes_of_an_engine_call_come_from_its_meta_info() -> None:
    meta = {"prompt_tokens": 5, "id": "r1", "finish_reason": {"type": "stop"}, "pd_x": 1, "other": 2}
    assert build_sglang_meta_trace_attrs(meta) == {
        "prompt_tokens": 5,
        "sglang_request_id": "r1",
        "finish_reason": "stop",
        "pd_x": 1,
    }
