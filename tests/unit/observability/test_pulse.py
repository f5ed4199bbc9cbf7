"""A process's progress reports, with a manual clock."""

from __future__ import annotations

from slime.observability.pulse import Beat, Pulse
from slime.utils.misc import SingletonMeta


def test_a_piece_of_work_is_overdue_beyond_twice_the_longest_of_its_kind_before():
    now = [0.0]
    pulse = type.__call__(Pulse, lambda: now[0])  # a second Pulse, beside the process's singleton
    for seconds, phase in (
        (5, "micro-batch"),
        (3, "optimizer step"),
        (2, "micro-batch"),
        (1, None),
        (70, "micro-batch"),
    ):
        pulse.mark(phase)
        now[0] += seconds
    beat = pulse.beat()
    assert beat == Beat(num_marks=5, phase="micro-batch", elapsed_s=70, longest_s=5)
    assert beat.overdue_s() == 60
    pulse.mark(None)
    now[0] += 1000
    assert pulse.beat() == Beat(6, None, 1000, None)
    assert pulse.beat().overdue_s() == 0, "nothing is marked"
    pulse.mark("save")
    now[0] += 1000
    assert pulse.beat().overdue_s() == 0, "the first of its kind"
    assert isinstance(Pulse, SingletonMeta) and Pulse() is Pulse()
