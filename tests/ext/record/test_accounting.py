"""GPU-seconds by cause: values by hand, with nothing counted twice or omitted."""

from __future__ import annotations

import random

import pytest

from slime.ext.record.accounting import CAUSES, IDLE, Span, gpu_classes, gpu_seconds


def span(name, start, end, process="driver"):
    return Span(name, process, start, end)


def test_the_innermost_span_is_the_cause_of_a_moment():
    spans = [
        span("rollout", 0, 10), span("generation", 1, 8), span("longest answer", 8, 9.5),
        span("train", 10, 14), span("actor_train", 10.5, 14), span("log_probs", 10.5, 11), span("push", 14, 15),
        span("forward", 11, 12), span("backward", 12, 13), span("communication", 13, 13.25), span("step", 0, 16),
        span("optimizer", 13.25, 13.5),
    ]  # fmt: skip
    (seconds,) = gpu_seconds(spans, gpu_classes(2, 2, is_shared=True), [0, 16])
    assert seconds == {
        "generation": 14, "longest answer": 3, "forward": 3, "backward": 2, "communication": 0.5, "optimizer": 0.5,
        "push and sleep": 2, IDLE: 2 * (1 + 0.5 + 0.5 + 0.5 + 1),
    }  # fmt: skip


def test_gpus_of_their_own_wait_for_each_other():
    spans = [span("rollout", 0, 4), span("generation", 0, 4), span("forward", 4, 6), span("push", 6, 7)]
    first, second = gpu_seconds(spans, gpu_classes(1, 3, is_shared=False), [0, 4, 7])
    assert first == {IDLE: 4, "generation": 12}
    assert second == {"forward": 2, "push and sleep": 1 + 3, IDLE: 3 * 2}


def test_a_recovery_counts_once_with_all_that_is_done_again_in_it():
    spans = [
        span("forward", 0, 2), span("recovery", 2, 8), span("init", 3, 5), span("forward", 5, 7), span("push", 8, 9),
        span("backward", 9, 10),
    ]  # fmt: skip
    (seconds,) = gpu_seconds(spans, gpu_classes(4, 0, is_shared=False), [0, 10])
    assert seconds == {"forward": 8, "start and recovery": 24, "push and sleep": 4, "backward": 4}
    # Engines continue while a trainer recovers, but not while their manager does.
    spans = [span("generation", 0, 10), span("recovery", 1, 3), span("manager_recovery", 5, 9), span("push", 8, 9)]
    (seconds,) = gpu_seconds(spans, gpu_classes(1, 2, is_shared=False), [0, 10])
    assert seconds == {"generation": 12, "start and recovery": 8 + 6, IDLE: 4}


def test_causes_add_up_whatever_overlaps():
    chance = random.Random(0)
    names = ["rollout", "generation", "train", "forward", "optimizer", "push", "save", "evaluation", "recovery"]
    spans = []
    for _ in range(300):
        start = chance.uniform(-5, 100)
        spans.append(span(chance.choice(names), start, start + chance.uniform(0, 9)))
    bounds = [0, 10, 10.5, 60, 100]
    intervals = gpu_seconds(spans, gpu_classes(1, 2, is_shared=False), bounds)
    assert [sum(one.values()) for one in intervals] == pytest.approx([30, 1.5, 148.5, 120])
    assert len(CAUSES) <= 12 and {cause for one in intervals for cause in one} <= set(CAUSES)
