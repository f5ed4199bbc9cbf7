"""The reward plug-in of the tiny task: the built-in ``math`` grader, if the response ends with its box.

    --custom-rm-path examples.tiny_arithmetic.reward.reward

The built-in grader accepts the last box at any position, so ending the turn would get no learning signal, and a policy
could drift into ``\\boxed{6}8}9}8}...`` up to the length limit without losing reward.
"""

from __future__ import annotations

import re
from argparse import Namespace
from typing import Any

from slime.rollout.rm_hub import grade_answer_verl
from slime.utils.types import Sample

END_OF_TURN = "<|im_end|>"


def ends_behind_its_box(sample: Sample) -> bool:
    """Return True if the response ended by itself and nothing follows its last box."""
    is_finished = sample.status not in (Sample.Status.TRUNCATED, Sample.Status.ABORTED, Sample.Status.FAILED)
    behind = sample.response.removesuffix(END_OF_TURN).rpartition("\\boxed")[2]
    return is_finished and re.fullmatch(r"\{[^{}]*\}", behind) is not None


def grade(sample: Sample) -> float:
    """Return 1.0 if the response ends with a box that holds the label, else 0.0."""
    if not ends_behind_its_box(sample):
        return 0.0
    return float(bool(grade_answer_verl(sample.response.removesuffix(END_OF_TURN), sample.label)))


async def reward(args: Namespace, sample: Sample | list[Sample], **kwargs: Any) -> float | list[float]:
    """``--custom-rm-path``: return a number for one sample, or a list for a list of samples."""
    if isinstance(sample, list):
        return [grade(one) for one in sample]
    return grade(sample)
