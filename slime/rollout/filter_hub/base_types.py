"""The output of a dynamic sampling filter, and whether it drops a group.

Built-in filters are in ``dynamic_sampling_filters``; ``slime.rollout.pool`` calls them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.utils.errors import HookError


@dataclass
class DynamicFilterOutput:
    """One filter's verdict on one finished group."""

    keep: bool
    reason: str | None = None
    """Why the group is dropped; part of the metric name ``rollout/dynamic_filter/drop_{reason}``."""
    keep_when_insufficient: bool = False
    """Keep a rejected group if dropping it would require another wave of prompts."""


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """Call a filter, which may return a DynamicFilterOutput or a truth value (Python, numpy or one-element tensor).

    If ``fn`` is None, every group is kept.

    Raises:
        HookError: the filter returned anything else.
    """
    if fn is None:
        return DynamicFilterOutput(keep=True)
    output = fn(*args, **kwargs)
    verdict = output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(keep=output)
    try:
        if verdict.keep is None or not hasattr(verdict.keep, "__bool__") or verdict.keep != verdict.keep:
            raise TypeError  # a coroutine, list or string is not a verdict
        verdict.keep = bool(verdict.keep)
    except (TypeError, ValueError, RuntimeError):
        raise HookError(
            f"The dynamic sampling filter {getattr(fn, '__name__', fn)} returned {str(output)[:80]!r} "
            f"({type(output).__name__}); it must return a DynamicFilterOutput or a bool. Change the function that "
            "--dynamic-sampling-filter-path names."
        ) from None
    return verdict


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Return True if the group is dropped.

    Args:
        remaining_batch_size: Groups kept so far plus groups still being generated, including this one.
        target_data_size: Groups that the rollout needs.
    """
    if output.keep:
        return False
    return not (output.keep_when_insufficient and remaining_batch_size <= target_data_size)


class MetricGatherer:
    """Counts dropped groups by reason."""

    def __init__(self) -> None:
        self._drops: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count one dropped group, as ``unspecified`` if the filter gave no reason."""
        self._drops[reason or "unspecified"] += 1

    def collect(self) -> dict[str, int]:
        """Return ``rollout/dynamic_filter/drop_{reason}`` for every reason seen."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in sorted(self._drops.items())}
