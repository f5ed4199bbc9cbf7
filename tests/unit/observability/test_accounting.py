"""GPU-seconds by cause: values by hand, and nothing counted twice or left out."""

from __future__ import annotations

import random

import pytest

from slime.observability.accounting import CAUSES, IDLE, Span, gpu_classes, gpu_seconds


def span(name, start, end, process="driver"):
    return Span(name, process, start, end)


def test_the_innermost_span_is_the_cause_of_a_moment():
    spans = [
        span("rollout", 0, 10), span("generation", 1, 8), span("longest answer", 8, 9.5),
        span("train", 10, 14), span("actor_train", 11, 13.5), span("push", 14, 15), span("step", 0, 16),
    ]  # fmt: skip
    (seconds,) = gpu_seconds(spans, gpu_classes(2, 2, is_shared=True), [0, 16])
    assert seconds == {
        "data": 2 * (1 + 0.5 + 1 + 0.5), "generation": 14, "longest answer": 3, "training step": 5, "push": 2, IDLE: 2
    }  # fmt: skip


def test_gpus_of_their_own_wait_for_each_other():
    spans = [span("rollout", 0, 4), span("generation", 0, 4), span("actor_train", 4, 6), span("push", 6, 7)]
    first, second = gpu_seconds(spans, gpu_classes(1, 3, is_shared=False), [0, 4, 7])
    assert first == {IDLE: 4, "generation": 12}
    assert second == {"training step": 2, "push": 1 + 3, IDLE: 3 * 2}


def test_causes_add_up_whatever_overlaps():
    chance = random.Random(0)
    names = ["rollout", "generation", "train", "actor_train", "push", "save", "evaluation", "unknown"]
    spans = []
    for _ in range(300):
        start = chance.uniform(-5, 100)
        spans.append(span(chance.choice(names), start, start + chance.uniform(0, 9)))
    bounds = [0, 10, 10.5, 60, 100]
    intervals = gpu_seconds(spans, gpu_classes(1, 2, is_shared=False), bounds)
    assert [sum(one.values()) for one in intervals] == pytest.approx([30, 1.5, 148.5, 120])
    assert len(CAUSES) <= 12 and {cause for one in intervals for cause in one} <= set(CAUSES)
