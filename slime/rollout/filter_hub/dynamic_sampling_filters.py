"""Built-in filters for ``--dynamic-sampling-filter-path``: drop groups whose rewards are all equal.

Under a group-relative estimator such a group has zero advantage, so training on its tokens costs time and teaches
nothing.
Source: DAPO, arXiv:2503.14476, sec. 3.2.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from slime.rollout.base_types import Group, leaf_samples
from slime.rollout.filter_hub.base_types import DynamicFilterOutput

MIN_REWARD_STD = 1e-6


def check_reward_nonzero_std(args: Namespace, samples: Group, **kwargs: Any) -> DynamicFilterOutput:
    """Keep the group if the unbiased standard deviation of its rewards exceeds 1e-6.

    All graded samples count, including each sample of a fanned-out execution.  A group with fewer than two graded
    samples is dropped.
    """
    rewards = [float(sample.get_reward_value(args)) for sample in leaf_samples(samples) if sample.is_graded]
    std = torch.tensor(rewards, dtype=torch.float64).std() if len(rewards) > 1 else torch.zeros(())
    keep = bool(std > MIN_REWARD_STD)
    reason = f"zero_std_{round(rewards[0], 1)}" if rewards else "not_graded"
    return DynamicFilterOutput(keep=keep, reason=None if keep else reason)


def check_reward_nonzero_std_with_fallback(args: Namespace, samples: Group, **kwargs: Any) -> DynamicFilterOutput:
    """Like ``check_reward_nonzero_std``, but keep a rejected group if dropping it would leave too few groups."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    output.keep_when_insufficient = True
    return output
