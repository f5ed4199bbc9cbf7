"""What engines said about their requests, from the traces of the samples: latencies, queueing, speed of decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime.observability.metric_utils import compute_statistics, dict_add_prefix
from slime.utils.types import Sample

REQUEST_SPANS = frozenset({"sglang_generate", "sglang_generate_stream"})
_NAMES = {
    "e2e_latency": "request/e2e_latency",
    "queue_time": "request/queue_time",
    "decode_throughput": "decode/throughput",
}
_DISAGGREGATED = {"pd_prefill_": "prefill/", "pd_decode_": "decode/"}
"""Prefix of a fact of prefill/decode disaggregation -> prefix of its metric."""


def compute_request_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """mean, median, max and min over requests, without a prefix.  Seconds; tokens per second for throughput.

    ``request/e2e_latency/*``, ``request/queue_time/*``, ``decode/throughput/*``, and ``prefill/{fact}/*`` and
    ``decode/{fact}/*`` for the ``pd_prefill_*`` and ``pd_decode_*`` facts of disaggregated engines.  A fact that no
    request has is left out.
    """
    values: dict[str, list[float]] = {}
    for attrs in request_attrs(samples):
        for fact, value in attrs.items():
            name = _metric_of(fact)
            if name is not None and isinstance(value, int | float) and not isinstance(value, bool):
                values.setdefault(name, []).append(float(value))
    metrics: dict[str, float] = {}
    for name, numbers in values.items():
        metrics |= dict_add_prefix(compute_statistics(numbers), f"{name}/")
    return metrics


def request_attrs(samples: Sequence[Sample]) -> Iterator[Mapping[str, Any]]:
    """The attributes of every finished request in the traces of ``samples``."""
    for sample in samples:
        trace = getattr(sample, "trace", None)
        for event in trace.get("events", ()) if isinstance(trace, Mapping) else ():
            if event["type"] == "span_end" and event["name"] in REQUEST_SPANS:
                yield event.get("attrs") or {}


def _metric_of(fact: str) -> str | None:
    for prefix, metric_prefix in _DISAGGREGATED.items():
        if fact.startswith(prefix):
            return metric_prefix + fact.removeprefix(prefix)
    return _NAMES.get(fact)
