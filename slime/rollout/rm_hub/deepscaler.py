r"""``--rm-type deepscaler``: grades the boxed answer after the thinking part, as in ``math_utils``.

A response must end its thinking (``</think>``) or start its answer (``###Response``); otherwise its reward is 0.  For
models that write neither, use ``--rm-type math``.
"""

from __future__ import annotations

from typing import Any

from slime.rollout.rm_hub.math_utils import extract_answer, is_same_answer, truth_of_label

THINKING_END = "</think>"
ANSWER_START = "###Response"


def answer_part(response: str) -> str | None:
    """Return the text after the last ``</think>``, or else after the last ``###Response``; None without either."""
    mark = THINKING_END if THINKING_END in response else ANSWER_START
    return response.rpartition(mark)[2] if mark in response else None


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """Return 1 if the last box of the answer part equals the label (or one of a list of labels), else 0."""
    part = answer_part(response)
    given = None if part is None else extract_answer(part)
    if given is None:
        return 0
    labels = label if isinstance(label, list | tuple) else [label]
    truths = [truth for truth in map(truth_of_label, labels) if truth is not None]
    return int(any(is_same_answer(given, truth) for truth in truths))
