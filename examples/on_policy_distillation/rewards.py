"""``--custom-reward-post-process-path examples.on_policy_distillation.rewards.zeros``.

The grader's reward is logged as the raw reward but not trained on, so the student learns from the teacher only.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from slime.utils.types import Sample


def zeros(args: Namespace, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Return (raw rewards, zeros)."""
    return [float(sample.get_reward_value(args)) for sample in samples], [0.0] * len(samples)
