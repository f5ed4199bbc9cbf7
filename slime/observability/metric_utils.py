"""Small pure functions that compute metrics from lists of numbers or texts."""

from __future__ import annotations

import zlib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from math import comb
from statistics import fmean, median
from typing import Any

from slime.flags.observability import TrackingConfig

_REPETITION_WINDOW = 10_000
"""Number of characters at the end of a text that are checked for repetition; shorter texts never count."""
_REPETITION_RATIO = 10.0


def dict_add_prefix(metrics: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the same metrics with ``prefix`` before every name."""
    return {f"{prefix}{name}": value for name, value in metrics.items()}


def compute_statistics(values: Sequence[float]) -> dict[str, float]:
    """Return mean, median, max and min of a non-empty list; empty in, empty out."""
    if not values:
        return {}
    return {
        "mean": fmean(values),
        "median": float(median(values)),
        "max": float(max(values)),
        "min": float(min(values)),
    }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the probability that k of ``num_samples`` responses, drawn without replacement, include a correct one:

        1 - C(n - c, k) / C(n, k)

    Source: Chen et al., arXiv:2107.03374, section 2.1.
    """
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def pass_rates(groups: Sequence[tuple[int, int]], most: int) -> dict[str, float]:
    """Return pass@1, pass@2, pass@4 ... up to ``most``, each averaged over the groups with at least k responses.

    Args:
        groups: (number of responses, number of correct ones) per prompt.
        most: responses requested per prompt.  With 1 there is no choice, and the result is empty.
    """
    rates: dict[str, float] = {}
    k = 1
    while 1 < most and k <= most:
        chances = [pass_at_k(responses, correct, k) for responses, correct in groups if responses >= k]
        if chances:
            rates[f"pass@{k}"] = fmean(chances)
        k *= 2
    return rates


def compute_pass_rate(
    flat_rewards: Sequence[float], group_size: int, num_groups: int | None = None
) -> dict[str, float]:
    """Return :func:`pass_rates` for rewards in group order; a reward of 1 means a correct response.

    Args:
        flat_rewards: the rewards of whole groups, one group after the other.
        group_size: responses per prompt.  With 1 there is no choice, and the result is empty.
        num_groups: expected number of groups; None derives it from ``flat_rewards``.
    """
    if group_size <= 1 or not flat_rewards:
        return {}
    if num_groups is None:
        num_groups = len(flat_rewards) // group_size
    if len(flat_rewards) != num_groups * group_size:
        raise ValueError(f"{len(flat_rewards)} rewards are not {num_groups} groups of {group_size}")
    groups = [flat_rewards[start : start + group_size] for start in range(0, len(flat_rewards), group_size)]
    return pass_rates([(group_size, sum(reward == 1 for reward in group)) for group in groups], group_size)


def compute_rollout_step(args: Namespace, rollout_id: int) -> int:
    """Return a rollout's x-axis value: its id, or optimizer steps with ``--wandb-always-use-train-step``."""
    if TrackingConfig.of(args).wandb_always_use_train_step:
        return rollout_id * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size
    return rollout_id


def compression_ratio(data: str | bytes, *, encoding: str = "utf-8", level: int = 9) -> tuple[float, float]:
    """Return (original / compressed size, percent saved) under zlib.  Empty data gives (inf, 0)."""
    raw = data.encode(encoding) if isinstance(data, str) else data
    if not raw:
        return float("inf"), 0.0
    compressed = len(zlib.compress(raw, level))
    return len(raw) / compressed, 100.0 * (1.0 - compressed / len(raw))


def has_repetition(text: str) -> bool:
    """Return whether a long response ends in a loop: its last 10,000 characters compress more than tenfold."""
    return len(text) > _REPETITION_WINDOW and compression_ratio(text[-_REPETITION_WINDOW:])[0] > _REPETITION_RATIO
