"""Traces: the events and spans of a sample.

A trace is stored in ``sample.trace``, a plain dict that survives ``to_dict`` and dumps::

    {"version": 1, "trace_id": str, "sample_id": int, "group_id": int, "attempt": int,
     "events": [{"type": "span_start" | "span_end" | "event", "name": str, "ts": seconds since the epoch,
                 "span_id": str, "parent_span_id": str | None, "attrs": dict}, ...]}

``trace_span(target, name)`` traces work on a Sample, a handle, or a (nested) list of them; spans opened inside it in
the same task become its children.  Tracing never breaks the traced code: tracing errors are logged at DEBUG level and
suppressed, errors of the traced code pass through.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import re
import time
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

logger = logging.getLogger(__name__)

TRACE_VERSION = 1
TRACE_CHILDREN_KEY = "__trace_children__"
"""Name of an attribute that holds finished child spans ({"name", "start", "end", "attrs"}, times in seconds since the
epoch); at the end of the span they become spans of the trace.
"""

_META_ATTRS = {
    "prompt_tokens": "prompt_tokens",
    "completion_tokens": "completion_tokens",
    "cached_tokens": "cached_tokens",
    "queue_time": "queue_time",
    "e2e_latency": "e2e_latency",
    "decode_throughput": "decode_throughput",
    "id": "sglang_request_id",
    "engine": "engine",
}


@dataclass
class TraceHandle:
    """A handle to a sample's trace, for code that does not have the sample."""

    carrier: dict[str, Any]
    """The dict in ``sample.trace``."""


_open_spans: ContextVar[Mapping[str, str]] = ContextVar("slime_open_spans", default=MappingProxyType({}))  # noqa: B039
"""trace_id -> id of the innermost open span in this task."""


_PROCESS_PREFIX = uuid.uuid4().hex
_number = itertools.count(1)


def _new_id(digits: int) -> str:
    return f"{_PROCESS_PREFIX[: digits - 8]}{next(_number) & 0xFFFFFFFF:08x}"


def _new_carrier() -> dict[str, Any]:
    return {"version": TRACE_VERSION, "trace_id": _new_id(32), "attempt": 0, "events": []}


def bind_trace(sample: Any) -> TraceHandle:
    """Return the handle of a sample's trace, starting a trace if it has none."""
    carrier = getattr(sample, "trace", None)
    if not isinstance(carrier, dict):
        carrier = _new_carrier()
        sample.trace = carrier
    if "events" not in carrier:
        carrier["events"] = []
    carrier["sample_id"] = getattr(sample, "index", None)
    carrier["group_id"] = getattr(sample, "group_index", None)
    return TraceHandle(carrier)


def bind_trace_carrier(carrier: dict[str, Any]) -> TraceHandle:
    """Return the handle of a trace dict from elsewhere (``export_trace``)."""
    carrier.setdefault("events", [])
    return TraceHandle(carrier)


def export_trace(target: Any) -> dict[str, Any] | None:
    """Return the trace of one sample or handle as a JSON-serializable dict, or None."""
    handles = _handles(target)
    return dict(handles[0].carrier) if handles else None


def import_trace(sample: Any, carrier: Mapping[str, Any] | None) -> TraceHandle:
    """Make ``carrier`` the trace of ``sample``."""
    if carrier is not None:
        sample.trace = dict(carrier)
    return bind_trace(sample)


def trace_next_attempt(target: Any) -> None:
    """Count another attempt, such as a sample that continues after an abort."""
    for handle in _handles(target):
        handle.carrier["attempt"] = handle.carrier.get("attempt", 0) + 1


def _handles(target: Any) -> list[TraceHandle]:
    if target is None:
        return []
    if isinstance(target, TraceHandle):
        return [target]
    if isinstance(target, list | tuple):
        return [handle for item in target for handle in _handles(item)]
    if hasattr(target, "tokens") and hasattr(target, "status"):
        return [bind_trace(target)]
    return []


def _event(
    kind: str, name: str, span_id: str | None, parent: str | None, attrs: dict[str, Any], ts: float | None = None
) -> dict[str, Any]:
    when = time.time() if ts is None else ts
    return {"type": kind, "name": name, "ts": when, "span_id": span_id, "parent_span_id": parent, "attrs": attrs}


def _child_events(children: Iterable[Mapping[str, Any]], parent: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    try:
        for child in children:
            span_id, attrs = _new_id(16), dict(child.get("attrs") or {})
            events.append(_event("span_start", child["name"], span_id, parent, {}, float(child["start"])))
            events.append(_event("span_end", child["name"], span_id, parent, attrs, float(child["end"])))
    except Exception:
        logger.debug("could not read child spans from %s", children, exc_info=True)
        return []
    return events


@dataclass
class TraceSpanContext:
    """An open span; attributes set on it are written at its end."""

    handles: list[TraceHandle]
    name: str
    attrs: dict[str, Any] = field(default_factory=dict)

    def set(self, key: str, value: Any) -> None:
        self.attrs[key] = value

    def update(self, attrs: Mapping[str, Any] | None = None, **more: Any) -> None:
        self.attrs.update(attrs or {}, **more)

    set_attr = set
    update_attrs = update


class trace_span:  # noqa: N801 - used as a function
    """Record the body of a ``with`` as a span of every sample in ``target``; see the module docstring.

    Entering returns the ``TraceSpanContext``.  This is a plain class because it is entered several times per sample of
    a rollout, and ``contextmanager`` doubles that cost.
    """

    __slots__ = ("_attrs", "_opened", "_record_error", "_span", "_target", "_token")

    def __init__(
        self, target: Any, name: str, *, attrs: Mapping[str, Any] | None = None, record_error: bool = True
    ) -> None:
        self._target = target
        self._attrs = attrs
        self._record_error = record_error
        self._span = TraceSpanContext([], name)
        self._opened: list[tuple[TraceHandle, str, str | None]] = []
        self._token: Token[Mapping[str, str]] | None = None

    def __enter__(self) -> TraceSpanContext:
        span = self._span
        try:
            span.handles = _handles(self._target)
            outer = _open_spans.get()
            inner = dict(outer)
            for handle in span.handles:
                carrier = handle.carrier
                trace_id, span_id = carrier.get("trace_id", ""), _new_id(16)
                parent = outer.get(trace_id)
                carrier["events"].append(_event("span_start", span.name, span_id, parent, dict(self._attrs or ())))
                inner[trace_id] = span_id
                self._opened.append((handle, span_id, parent))
            self._token = _open_spans.set(inner)
        except Exception:
            logger.debug("could not open the trace span %s", span.name, exc_info=True)
        return span

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: Any) -> None:
        span = self._span
        if error is not None and self._record_error:
            span.attrs["error"] = f"{type(error).__name__}: {error}"
        try:
            if self._token is not None:
                _open_spans.reset(self._token)
            children = span.attrs.pop(TRACE_CHILDREN_KEY, None) or ()
            for handle, span_id, parent in self._opened:
                handle.carrier["events"] += _child_events(children, span_id)
                handle.carrier["events"].append(_event("span_end", span.name, span_id, parent, dict(span.attrs)))
        except Exception:
            logger.debug("could not close the trace span %s", span.name, exc_info=True)


def trace_event(target: Any, name: str, *, attrs: Mapping[str, Any] | None = None) -> None:
    """Record one event, as a child of the open span."""
    try:
        for handle in _handles(target):
            parent = _open_spans.get().get(handle.carrier.get("trace_id", ""))
            handle.carrier["events"].append(_event("event", name, None, parent, dict(attrs or ())))
    except Exception:
        logger.debug("could not record the trace event %s", name, exc_info=True)


def _call_safely(function: Callable[..., Any] | None, *positional: Any, **keyword: Any) -> Any:
    if function is None:
        return None
    try:
        return function(*positional, **keyword)
    except Exception:
        logger.debug("a trace getter failed", exc_info=True)
        return None


def trace_function(
    name: str,
    *,
    target: str | None = None,
    target_getter: Callable[..., Any] | None = None,
    attrs_getter: Callable[..., Any] | None = None,
    record_error: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a plain or async function so that each call is a span.

    Args:
        name: name of the spans.
        target: name of the argument to trace; without it and ``target_getter``, the first argument that is a sample, a
            handle or a list of them.
        target_getter: called with the arguments; returns what to trace.
        attrs_getter: called with the arguments; returns the span's attributes.
        record_error: whether to record an exception as the attribute ``error``.
    """

    def find(positional: tuple[Any, ...], keyword: dict[str, Any], names: list[str]) -> Any:
        if target_getter is not None:
            return _call_safely(target_getter, *positional, **keyword)
        if target is not None:
            return {**dict(zip(names, positional, strict=False)), **keyword}.get(target)
        return next((item for item in (*positional, *keyword.values()) if _handles(item)), None)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        names = list(function.__code__.co_varnames[: function.__code__.co_argcount])

        if asyncio.iscoroutinefunction(function):

            @functools.wraps(function)
            async def traced_async(*positional: Any, **keyword: Any) -> Any:
                attrs = _call_safely(attrs_getter, *positional, **keyword)
                with trace_span(find(positional, keyword, names), name, attrs=attrs, record_error=record_error):
                    return await function(*positional, **keyword)

            return traced_async

        @functools.wraps(function)
        def traced(*positional: Any, **keyword: Any) -> Any:
            attrs = _call_safely(attrs_getter, *positional, **keyword)
            with trace_span(find(positional, keyword, names), name, attrs=attrs, record_error=record_error):
                return function(*positional, **keyword)

        return traced

    return decorate


def finished_spans(samples: Iterable[Any], names: Container[str]) -> Iterator[tuple[float, float, Mapping[str, Any]]]:
    """Yield start, end and attributes of the samples' finished spans with these names."""
    for sample in samples:
        starts: dict[str, float] = {}
        trace = getattr(sample, "trace", None)
        for one in trace.get("events", ()) if isinstance(trace, Mapping) else ():
            if one["name"] in names and one["type"] == "span_start":
                starts[one["span_id"]] = one["ts"]
            elif one["type"] == "span_end" and one["span_id"] in starts:
                yield starts.pop(one["span_id"]), one["ts"], one.get("attrs") or {}


def build_sglang_meta_trace_attrs(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of an engine call from its ``meta_info``: token counts, times, finish reason, request id.

    ``pd_*`` keys (prefill-decode disaggregation) keep their names, and the seconds spent in each phase become child
    spans.
    """
    attrs = {ours: meta[theirs] for theirs, ours in _META_ATTRS.items() if meta.get(theirs) is not None}
    reason = meta.get("finish_reason")
    if reason is not None:
        attrs["finish_reason"] = reason.get("type") if isinstance(reason, Mapping) else reason
    pd_attrs = {key: value for key, value in meta.items() if key.startswith("pd_") and value is not None}
    attrs.update(pd_attrs)
    if children := _phases(pd_attrs, meta.get("e2e_latency"), time.time()):
        attrs[TRACE_CHILDREN_KEY] = children
    return attrs


_PHASE = re.compile(r"pd_(prefill|decode)_(?!.*speed)(.+)_(?:duration|latency|time|s)")


def _phases(pd_attrs: Mapping[str, Any], latency_s: float | None, end: float) -> list[dict[str, Any]]:
    """Return the phases of a disaggregated call that ended at ``end`` as consecutive child spans.

    Engines report durations, not timestamps.  Both sides receive the request at once, so both sides start with it.
    """
    sides: dict[str, list[tuple[str, float]]] = {"prefill": [], "decode": []}
    for key, value in pd_attrs.items():
        match = _PHASE.fullmatch(key)
        if match and isinstance(value, int | float) and value > 0:
            sides[match[1]].append((match[2], float(value)))
    longest = max(sum(seconds for _, seconds in phases) for phases in sides.values())
    children = []
    for side, phases in sides.items():
        start = end - (latency_s or longest)
        for phase, seconds in phases:
            children.append({"name": f"{side}: {phase}", "start": start, "end": start + seconds, "attrs": {}})
            start += seconds
    return children
